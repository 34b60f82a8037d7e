"""Producers' prepared statements: planning these costs more than running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from zlib import crc32

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from django_mq.store.driver import THRESHOLD, begins_specially, may_prepare, results

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

FORGOTTEN = ""

# By driver connection: how often each statement was run; under FORGOTTEN, how often all counts were
# dropped.
_runs: WeakKeyDictionary[psycopg.Connection[Any], dict[str, int]] = WeakKeyDictionary()


def fetch_prepared(
    connection: BaseDatabaseWrapper, statement: str, values: Sequence[object]
) -> list[bytes] | None:
    """Run a prepared statement; return the first column of its rows, as text.

    This takes a third of the time of a driver's cursor, since nothing is looked up or converted.
    Returns None, without running anything, where a cursor is needed:

    - a query log, `assertNumQueries` or an execute wrapper watches the connection;
    - the driver prepares statements itself (on a rollback it may then deallocate all);
    - the driver begins its transactions with options of its own;
    - the session's encoding is not UTF-8;
    - the statement has run fewer than THRESHOLD times here.
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
    runs = _runs.setdefault(driver, {})
    times = runs.get(statement, 0)
    if times < THRESHOLD:
        runs[statement] = times + 1
        return None
    name, numbered = _named(statement, runs.get(FORGOTTEN, 0))
    with driver.lock:
        if begins:
            pgconn.send_query(b"begin")
            results(driver)
        if times == THRESHOLD:
            try:
                pgconn.send_prepare(name, numbered)
                results(driver)
                runs[statement] = times + 1
            except BaseException:  # an interrupt, too: the server may or may not have prepared it
                _forget(runs)
                raise
        pgconn.send_query_prepared(
            name, [None if value is None else str(value).encode() for value in values]
        )
        try:
            (result,) = results(driver)
        except psycopg.errors.InvalidSqlStatementName:
            _forget(runs)  # the session deallocated it
            if pgconn.transaction_status == TransactionStatus.IDLE:
                return None  # outside a transaction: the caller tries a cursor
            raise
    return [result.get_value(row, 0) or b"" for row in range(result.ntuples)]


@contextmanager
def own_cursor(connection: BaseDatabaseWrapper) -> Iterator[Any]:
    """Yield a cursor for this package's statements on the caller's connection.

    Django's, or the driver's own if OPTIONS let it prepare statements and nothing watches the
    connection.
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
    """Return whether something watches the statements; tests replace `cursor` to forbid them."""
    replaced = vars(connection).get("cursor")
    return bool(
        connection.queries_logged
        or connection.execute_wrappers
        or (replaced is not None and getattr(replaced, "__self__", None) is not connection)
    )


def _forget(runs: dict[str, int]) -> None:
    """Start again under new names, since the server may still know the old ones."""
    forgotten = runs.get(FORGOTTEN, 0) + 1
    runs.clear()
    runs[FORGOTTEN] = forgotten


@lru_cache(maxsize=256)
def _named(statement: str, forgotten: int) -> tuple[bytes, bytes]:
    """Return the statement's name on the server, and its text with the server's placeholders.

    >>> _named("select %s, %s", 0)
    (b'django_mq_bc18adda_0', b'select $1, $2')
    """
    first, *others = statement.split("%s")
    numbered = first + "".join(f"${n}{text}" for n, text in enumerate(others, 1))
    return f"django_mq_{crc32(numbered.encode()):08x}_{forgotten}".encode(), numbered.encode()
