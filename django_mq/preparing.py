"""Producers' statements that the server keeps prepared: planning costs more than running them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: A statement is prepared when it was said so often on a connection: not for a single request.
THRESHOLD = 2


def may_prepare(connection: BaseDatabaseWrapper) -> bool:
    """Say whether statements may be prepared on the server: not through a transaction pooler.

    DISABLE_SERVER_SIDE_CURSORS is Django's own sign of one. Who wrote `prepare_threshold: None`
    into OPTIONS means it too; left out, Django has the same there.
    """
    settings = connection.settings_dict
    return (
        not settings.get("DISABLE_SERVER_SIDE_CURSORS")
        and settings["OPTIONS"].get("prepare_threshold", THRESHOLD) is not None
    )


@contextmanager
def own_cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Return a cursor for our own statements on the caller's connection, prepared if they may be.

    Where somebody looks on (a query log, `assertNumQueries`, an execute wrapper), it is Django's
    own cursor, so that they see the statement.
    """
    if connection.queries_logged or connection.execute_wrappers or not may_prepare(connection):
        with connection.cursor() as cursor:
            yield cursor
        return
    connection.validate_no_broken_transaction()
    connection.ensure_connection()
    driver: psycopg.Connection[Any] = connection.connection
    before, driver.prepare_threshold = driver.prepare_threshold, THRESHOLD
    try:
        with psycopg.Cursor(driver) as cursor:
            yield cursor
    finally:
        driver.prepare_threshold = before
