"""Producers' statements that the server keeps prepared: planning costs more than running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from zlib import crc32

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from psycopg.pq.abc import PGresult

#: A statement is prepared when it was said so often on a connection: not for a single request.
THRESHOLD = 2
FORGOTTEN = ""

# How often a statement was said on a connection of the driver; of FORGOTTEN, how often all counts
# were dropped.
_said: WeakKeyDictionary[psycopg.Connection[Any], dict[str, int]] = WeakKeyDictionary()


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


def fetch_prepared(
    connection: BaseDatabaseWrapper, statement: str, values: Sequence[object]
) -> list[bytes] | None:
    """Run a prepared statement; return the first column of its rows, as text.

    A third of what a cursor of the driver takes for it, since nothing is looked up or converted.
    None, and nothing was done, where a cursor is needed: where somebody looks on (a query log,
    `assertNumQueries`, an execute wrapper), where the driver itself prepares statements (a
    rollback then makes it deallocate all), where it begins its transactions in a way of its own,
    where the session is not in UTF-8, and the first times.
    """
    if _is_watched(connection) or not may_prepare(connection) or connection.needs_rollback:
        return None
    connection.close_if_health_check_failed()
    driver: psycopg.Connection[Any] | None = connection.connection
    if driver is None or driver.prepare_threshold is not None:
        return None
    pgconn, begins = driver.pgconn, False
    if pgconn.transaction_status == TransactionStatus.IDLE:
        begins = not driver.autocommit
    elif pgconn.transaction_status != TransactionStatus.INTRANS:
        return None
    if pgconn.pipeline_status != PipelineStatus.OFF or (begins and begins_specially(driver)):
        return None
    if pgconn.parameter_status(b"client_encoding") != b"UTF8":
        return None
    said = _said.setdefault(driver, {})
    times = said.get(statement, 0)
    if times < THRESHOLD:
        said[statement] = times + 1
        return None
    name, numbered = _named(statement, said.get(FORGOTTEN, 0))
    with driver.lock:
        if begins:
            pgconn.send_query(b"begin")
            results(driver)
        if times == THRESHOLD:
            try:
                pgconn.send_prepare(name, numbered)
                results(driver)
                said[statement] = times + 1
            except BaseException:  # an interrupt, too: the server may have it or not
                _forget(said)
                raise
        pgconn.send_query_prepared(
            name, [None if value is None else str(value).encode() for value in values]
        )
        try:
            (result,) = results(driver)
        except psycopg.errors.InvalidSqlStatementName:
            _forget(said)  # somebody deallocated it, or all
            if pgconn.transaction_status == TransactionStatus.IDLE:
                return None  # and no transaction is broken by it
            raise
    return [result.get_value(row, 0) or b"" for row in range(result.ntuples)]


@contextmanager
def own_cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Return a cursor for our own statements on the caller's connection.

    The driver's where that prepares statements by itself, by OPTIONS. Elsewhere, and where somebody
    looks on, Django's.
    """
    connection.validate_no_broken_transaction()
    connection.validate_thread_sharing()
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    driver: psycopg.Connection[Any] = connection.connection
    plain = _is_watched(connection) or driver.prepare_threshold is None
    with connection.cursor() if plain else psycopg.Cursor(driver) as cursor:
        yield cursor


def _is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Say whether somebody wants to see our statements; tests replace `cursor` to refuse them."""
    replaced = vars(connection).get("cursor")
    return bool(
        connection.queries_logged
        or connection.execute_wrappers
        or (replaced is not None and getattr(replaced, "__self__", None) is not connection)
    )


def begins_specially(driver: psycopg.Connection[Any]) -> bool:
    """Say whether the driver begins its transactions with more than a plain BEGIN."""
    return (driver.isolation_level, driver.read_only, driver.deferrable) != (None, None, None)


def results(driver: psycopg.Connection[Any]) -> list[PGresult]:
    """Wait for what the server answers to what was sent, raise what it refused.

    The caller holds the driver's lock, and has sent it.
    """
    found: list[PGresult] = driver.wait(generators.execute(driver.pgconn))
    for result in found:
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise psycopg.errors.error_from_result(result, encoding=driver.info.encoding)
    return found


def _forget(said: dict[str, int]) -> None:
    """Begin anew, with other names: what the server still has under the old ones is not known."""
    forgotten = said.get(FORGOTTEN, 0) + 1
    said.clear()
    said[FORGOTTEN] = forgotten


@lru_cache(maxsize=256)
def _named(statement: str, forgotten: int) -> tuple[bytes, bytes]:
    """Return the statement's name on the server, and its text with the server's placeholders.

    >>> _named("select %s, %s", 0)
    (b'django_mq_bc18adda_0', b'select $1, $2')
    """
    first, *others = statement.split("%s")
    numbered = first + "".join(f"${n}{text}" for n, text in enumerate(others, 1))
    return f"django_mq_{crc32(numbered.encode()):08x}_{forgotten}".encode(), numbered.encode()
