"""Begin the transaction of a slice: BEGIN, its settings and its locks, in one query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from django_mq.executor import slice_limits
from django_mq.executor.calls import is_conflict
from django_mq.executor.connections import roll_back
from django_mq.executor.savepoint_statements import SAVEPOINT
from django_mq.executor.simple_protocol import simple_query
from django_mq.messages import PlainFence
from django_mq.store import row_locks
from django_mq.store.limits import set_each


def begin(
    driver: psycopg.Connection[Any],
    fences: Sequence[PlainFence],
    settings: Mapping[str, str],
    *,
    own_session: bool,
    savepoint: bool = False,
) -> row_locks.LockResult:
    """Begin a transaction on `driver` and lock the rows of `fences`, in one round trip.

    Skips rows that another session has locked. The server `settings` hold until the end of the
    transaction; in a worker's `own_session`, its limits hold outside the savepoints of handlers.
    With `savepoint`, a handler's savepoint is open afterwards. Continues a transaction that is
    already open (a test's). Raises psycopg's errors, after which no transaction is open.
    """
    within = driver.info.transaction_status == TransactionStatus.INTRANS
    steps = "" if within else f"{begin_statement(driver)}; "
    if own_session:
        steps += f"{slice_limits.worker_limits(settings)}; "
    steps += set_each(settings) + row_locks.lock(fences)
    if savepoint:
        steps += f"; savepoint {SAVEPOINT}"
        if own_session:
            steps += f"; {slice_limits.handler_limits(settings)}"
    rows = _query(driver, steps, within)
    return row_locks.parse_lock_result(rows[0] if rows else (), fences)


def wait_for(
    driver: psycopg.Connection[Any], fences: Sequence[PlainFence], settings: Mapping[str, str]
) -> str | None:
    """Lock the rows of `fences` in the transaction of `begin()`; return the transaction's id.

    Waits up to `row_locks.LOCK_WAIT_SECONDS` for the locks of other sessions. If a row is still not
    locked then, it rolls the transaction back and returns None.
    """
    try:
        rows = _query(
            driver,
            f"release savepoint {SAVEPOINT}; {slice_limits.worker_limits(settings)};"
            f" {row_locks.lock_waiting(fences)};"
            f" {slice_limits.worker_limits(settings)}; savepoint {SAVEPOINT};"
            f" {slice_limits.handler_limits(settings)}",
            False,
        )
    except psycopg.Error as error:
        if not (is_conflict(error) or isinstance(error, psycopg.errors.QueryCanceled)):
            raise
        return None
    locked = row_locks.parse_lock_result(rows[0] if rows else (), fences)
    if locked.missing:
        roll_back(driver)
        return None
    return locked.xid


def begin_statement(driver: psycopg.Connection[Any]) -> str:
    """Return BEGIN as the driver would send it, with the options set for the alias."""
    words = ["begin"]
    if driver.isolation_level is not None:
        level = psycopg.IsolationLevel(driver.isolation_level)
        words.append(f"isolation level {level.name.lower().replace('_', ' ')}")
    if driver.read_only is not None:
        words.append("read only" if driver.read_only else "read write")
    if driver.deferrable is not None:
        words.append("deferrable" if driver.deferrable else "not deferrable")
    return " ".join(words)


def _query(driver: psycopg.Connection[Any], steps: str, within: bool) -> list[list[bytes | None]]:
    try:
        return simple_query(driver, steps)
    except BaseException:
        if driver.pgconn.transaction_status == TransactionStatus.ACTIVE:
            driver.close()  # interrupted: the next query would read this one's answer
        elif not within:
            roll_back(driver)
        raise
