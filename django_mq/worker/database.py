"""Connections of the worker's own: plain ones, whatever the alias has for web requests."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import InterfaceError, OperationalError
from psycopg import sql
from psycopg.pq import Format

from django_mq.preparing import THRESHOLD, may_prepare
from django_mq.store import Cursor

logger = logging.getLogger("django_mq")

#: What an unreachable or lost server raises, through Django and through the driver; one that is
#: read-only is a standby that we were led to.
LOST = (
    OperationalError,
    InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
)

#: Seconds between two tries to reach a lost database: first, and at most.
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0


def plain_connection(alias: str) -> BaseDatabaseWrapper:
    """Return a new connection to `alias` that is not from Django's pool and does not age."""
    original = connections[alias]
    settings: dict[str, Any] = copy.deepcopy(original.settings_dict)
    settings["OPTIONS"].pop("pool", None)
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False)
    return type(original)(settings, alias)


# Each of our statements has one good plan, by its index, whatever the statistics say; looking for
# it each time costs a claim 0.3 of 2.4 ms. Without the last four, the generic plan of a claim that
# was prepared on an empty table hashes the whole of a large one later. A plan that must scan a
# small table all the same looks so dear then that the server would compile it: 70 ms for one of 1.
ONE_PLAN = """
set plan_cache_mode = force_generic_plan; set jit = off;
set enable_seqscan = off; set enable_bitmapscan = off;
set enable_hashjoin = off; set enable_mergejoin = off
"""


class Statements:
    """A connection for statements of the worker itself, each its own transaction.

    Its statements are prepared on the server, unless the alias goes through a pooler that
    cannot have that (`DISABLE_SERVER_SIDE_CURSORS`, Django's own sign of one).
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._wrapper: BaseDatabaseWrapper | None = None
        self._cursor: RepeatingCursor | None = None

    def cursor(self) -> Cursor:
        """Return a cursor; connects when needed, for the thread that first asks.

        Raises what is in LOST.
        """
        wrapper = self._wrapper
        if wrapper is None:
            wrapper = self._wrapper = plain_connection(self._alias)
        if wrapper.connection is None or wrapper.connection.closed:
            wrapper.close()
            wrapper.connect()
            # Whatever the alias has: where a lock is taken first, the next snapshot follows it.
            wrapper.connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            if prepare_statements(wrapper):
                wrapper.connection.execute(ONE_PLAN)
            self._cursor = RepeatingCursor(wrapper.connection)
        return self._cursor  # type: ignore[return-value]

    def transaction(self) -> AbstractContextManager[Any]:
        """Return a block whose statements are one transaction; call `cursor()` first."""
        driver: psycopg.Connection[Any] = self._wrapper.connection  # type: ignore[union-attr]
        return driver.transaction()

    def close(self) -> None:
        """Close the connection; the next statement opens a new one."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            with contextlib.suppress(*LOST):
                wrapper.close()


class RepeatingCursor:
    """Says each of a few statements by a cursor of its own.

    The driver knows how to write the parameters of a statement, and how to read its columns, for
    as long as its cursor says nothing else: to find that out anew is a sixth of a claim of one.
    """

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self.connection = driver
        self._cursors: dict[str, psycopg.Cursor[Any]] = {}
        self._last = statement_cursor(driver)

    def execute(self, sql: str, params: Any = None) -> psycopg.Cursor[Any]:
        cursor = self._cursors.get(sql)
        if cursor is None:
            cursor = self._cursors[sql] = statement_cursor(self.connection)
        self._last = cursor
        return cursor.execute(sql, params)

    @property
    def rowcount(self) -> int:
        return self._last.rowcount

    def fetchall(self) -> list[Any]:
        return self._last.fetchall()

    def fetchone(self) -> Any:
        return self._last.fetchone()


def statement_cursor(driver: psycopg.Connection[Any]) -> psycopg.Cursor[Any]:
    """Return a cursor for our own statements on an open connection.

    Binary: Django's own loader of timestamps is Python and made a claimed row cost 16 us, not 1.
    """
    cursor = psycopg.Cursor(driver)
    cursor.format = Format.BINARY
    return cursor


def prepare_statements(wrapper: BaseDatabaseWrapper) -> bool:
    """Let server-bound cursors on this connection use prepared statements, where that is safe.

    Returns whether it is: not through a transaction pooler.
    """
    safe = may_prepare(wrapper)
    if safe:
        wrapper.connection.prepare_threshold = THRESHOLD
    return safe


def taking_back(wrapper: BaseDatabaseWrapper) -> sql.Composed:
    """Return the statements that undo whatever somebody SET for this session."""
    steps: list[sql.Composable] = [
        sql.SQL("reset session authorization"),  # RESET ALL leaves this one and the role
        sql.SQL("reset role"),
        sql.SQL("reset all"),
    ]
    if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
        steps.append(sql.SQL("set role {}").format(sql.Identifier(role)))
    if timezone := wrapper.timezone_name:
        steps.append(sql.SQL("set time zone {}").format(sql.Literal(timezone)))
    return sql.SQL("; ").join(steps)


class Outage:
    """One for a process: whoever meets a lost database waits here, and one line says so."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._wait = FIRST_WAIT
        self._said_at = float("-inf")

    def wait(self, error: BaseException) -> None:
        """Log at most once a wait, then sleep until the next try is due, or we stop."""
        with self._lock:
            wait = self._wait
            if monotonic() - self._said_at >= wait:
                self._said_at = monotonic()
                self._wait = min(wait * 2, LONGEST_WAIT)
                logger.warning(
                    "database lost (%s); trying again in %.2g s",
                    " ".join(str(error).split())[:200] or type(error).__name__,
                    wait,
                    extra={"event": "database_lost"},
                )
        self._stop.wait(wait)

    def wait_quietly(self) -> None:
        """Sleep a first wait, or until we stop."""
        self._stop.wait(FIRST_WAIT)

    def stopped(self) -> bool:
        """Say whether the process has no time left to wait for anything."""
        return self._stop.is_set()

    def over(self) -> None:
        """The database answers: the next outage begins with a short wait again."""
        if self._wait != FIRST_WAIT:
            with self._lock:
                self._wait = FIRST_WAIT
            logger.info("database is back", extra={"event": "database_back"})
