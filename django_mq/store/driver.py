"""Direct use of the driver: whether statements may be prepared, and the server's results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from psycopg.pq.abc import PGresult

#: A connection prepares a statement after this many executions, so that a statement that runs once
#: is not prepared.
THRESHOLD = 2
#: Clears what a handler may leave in its session besides settings: releases session locks, closes
#: cursors that were declared WITH HOLD, stops listening, and drops temporary tables. Not DISCARD
#: ALL: its DEALLOCATE ALL would also drop the driver's prepared statements.
DISCARD = "select pg_advisory_unlock_all(); close all; unlisten *; discard temp"


def may_prepare(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server may prepare statements: not through a transaction pooler.

    DISABLE_SERVER_SIDE_CURSORS is the setting by which Django users declare a pooler. An explicit
    `prepare_threshold: None` in OPTIONS means the same; it is also Django's default.
    """
    settings = connection.settings_dict
    return (
        not settings.get("DISABLE_SERVER_SIDE_CURSORS")
        and settings["OPTIONS"].get("prepare_threshold", THRESHOLD) is not None
    )


def results(driver: psycopg.Connection[Any]) -> list[PGresult]:
    """Wait for the results of the queries that were sent; raise the server's error, if any.

    The caller has sent the queries and holds the driver's lock.
    """
    found: list[PGresult] = driver.wait(generators.execute(driver.pgconn))
    for result in found:
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise psycopg.errors.error_from_result(result, encoding=driver.info.encoding)
    return found
