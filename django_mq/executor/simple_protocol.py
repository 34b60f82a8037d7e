"""Statements over the simple protocol: several in one round trip, none prepared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult

from django_mq.store.driver import results


def simple_query(driver: psycopg.Connection[Any], statements: str) -> list[list[bytes | None]]:
    """Run `statements`, which contain their values, in one round trip; return the rows as text.

    Prepares nothing and creates no cursor. Raises psycopg's errors. Does not take the driver's
    lock, which a handler's cursor may hold when its first use calls this.
    """
    return rows_of(simple_results(driver, statements))


def simple_results(driver: psycopg.Connection[Any], statements: str) -> list[PGresult]:
    """Like `simple_query()`, but return the results of the statements and read no rows."""
    driver.pgconn.send_query(statements.encode(driver.info.encoding))
    answers = results(driver)
    if driver.pgconn.status == ConnStatus.BAD:
        raise psycopg.OperationalError("the connection is lost")
    return answers


def rows_of(answers: Iterable[PGresult]) -> list[list[bytes | None]]:
    """Return the rows of results as text."""
    return [
        [answer.get_value(row, column) for column in range(answer.nfields)]
        for answer in answers
        if answer.status == ExecStatus.TUPLES_OK
        for row in range(answer.ntuples)
    ]
