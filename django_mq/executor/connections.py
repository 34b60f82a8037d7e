"""The worker's own connections: not pooled and not aged, whatever the alias is set to."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import InterfaceError, OperationalError
from psycopg import sql
from psycopg.pq import ConnStatus, ExecStatus, Format, TransactionStatus

from django_mq.store import Cursor
from django_mq.store.driver import THRESHOLD, may_prepare, results
from django_mq.store.session_state import DISCARD

logger = logging.getLogger("django_mq")

#: The errors of an unreachable or lost server, through Django and through the driver. A read-only
#: one is a standby after a failover.
LOST = (
    OperationalError,
    InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
)

#: Seconds between two tries to reach a lost database: the first wait, and the longest.
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0


def plain_connection(alias: str) -> BaseDatabaseWrapper:
    """Return a new connection to `alias` that is not from Django's pool and does not age."""
    original = connections[alias]
    settings: dict[str, Any] = copy.deepcopy(original.settings_dict)
    settings["OPTIONS"].pop("pool", None)
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False)
    return type(original)(settings, alias)


@contextlib.contextmanager
def plain_connection_as(alias: str) -> Iterator[BaseDatabaseWrapper]:
    """Make `connections[alias]` of this thread a plain connection within the block.

    Django code that is given a connection may still look it up by alias, and open its pool.
    """
    original = connections[alias]
    connections[alias] = plain = plain_connection(alias)
    try:
        yield plain
    finally:
        connections[alias] = original
        plain.close()


# Each of our statements has one good plan, by its index, whatever the statistics say; planning it
# each time costs a claim 0.3 of 2.4 ms. Without the last four settings, the generic plan of a claim
# prepared on an empty table hashes a whole large table later. With them, a necessary scan of a
# small table has so high a cost that JIT would compile it: 70 ms for a statement of 1 ms.
ONE_PLAN = """
set plan_cache_mode = force_generic_plan; set jit = off;
set enable_seqscan = off; set enable_bitmapscan = off;
set enable_hashjoin = off; set enable_mergejoin = off
"""


class Statements:
    """A connection for statements of the worker itself, each its own transaction.

    Its statements are prepared on the server, unless the alias goes through a transaction pooler
    (marked in Django's settings by `DISABLE_SERVER_SIDE_CURSORS`).
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._wrapper: BaseDatabaseWrapper | None = None
        self._cursor: RepeatingCursor | None = None

    def cursor(self) -> Cursor:
        """Return a cursor; connects when needed. Raises the errors in LOST."""
        wrapper = self._wrapper
        if wrapper is None:
            wrapper = self._wrapper = plain_connection(self._alias)
        if wrapper.connection is None or wrapper.connection.closed:
            wrapper.close()
            wrapper.connect()
            # Whatever the alias sets: after a lock, the next statement must see a newer snapshot.
            wrapper.connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            if prepare_statements(wrapper):
                wrapper.connection.execute(ONE_PLAN)
            self._cursor = RepeatingCursor(wrapper.connection)
        return self._cursor  # type: ignore[return-value]

    def transaction(self) -> AbstractContextManager[Any]:
        """Return a block whose statements are one transaction; call `cursor()` first."""
        driver: psycopg.Connection[Any] = self._wrapper.connection  # type: ignore[union-attr]
        return driver.transaction()

    def is_alive(self) -> bool:
        """Say whether the connection survived the last error; if so, the server answered."""
        wrapper = self._wrapper
        return (
            wrapper is not None
            and wrapper.connection is not None
            and not (wrapper.connection.closed)
        )

    def close(self) -> None:
        """Close the connection; the next statement opens a new one."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            with contextlib.suppress(*LOST):
                wrapper.close()


class RepeatingCursor:
    """Runs each statement on a cursor of its own.

    A psycopg cursor remembers how to write the parameters and read the columns of its last
    statement. Finding that out anew costs a sixth of a claim of one message.
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


def simple_query(driver: psycopg.Connection[Any], statements: str) -> list[list[bytes | None]]:
    """Run `statements`, which contain their values, in one round trip; return the rows as text.

    Prepares nothing, and makes no cursor. Raises psycopg's errors. Does not take the driver's lock:
    the handler's own cursor may have it when its first use calls this.
    """
    driver.pgconn.send_query(statements.encode(driver.info.encoding))
    answers = results(driver)
    if driver.pgconn.status == ConnStatus.BAD:
        raise psycopg.OperationalError("the connection is lost")
    return [
        [answer.get_value(row, column) for column in range(answer.nfields)]
        for answer in answers
        if answer.status == ExecStatus.TUPLES_OK
        for row in range(answer.ntuples)
    ]


def within_transaction(cursor: Cursor) -> AbstractContextManager[Any]:
    """Return a block that runs in the open transaction, or in a new one."""
    driver: psycopg.Connection[Any] = cursor.connection
    if driver.info.transaction_status == TransactionStatus.IDLE:
        return driver.transaction()
    return nullcontext()


def prepare_statements(wrapper: BaseDatabaseWrapper) -> bool:
    """Let server-bound cursors on this connection use prepared statements, if that is safe.

    Returns whether it is safe: it is not through a transaction pooler.
    """
    safe = may_prepare(wrapper)
    if safe:
        wrapper.connection.prepare_threshold = THRESHOLD
    return safe


def take_back(wrapper: BaseDatabaseWrapper) -> None:
    """Reset the session outside a transaction, in one round trip: settings, locks, cursors ...

    Behind a transaction pooler only the settings, since the statements may reach a session in
    which others left something. Raises the driver's errors.
    """
    steps = [taking_back(wrapper)]
    if may_prepare(wrapper):
        steps.append(sql.Composed([sql.SQL(DISCARD)]))
    psycopg.ClientCursor(wrapper.connection).execute(sql.SQL("; ").join(steps))


def taking_back(wrapper: BaseDatabaseWrapper) -> sql.Composed:
    """Return the statements that reset whatever was SET for this session."""
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
    """The outage of a process: its threads wait here for a lost database, with one log line."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._wait = FIRST_WAIT
        self._said_at = float("-inf")

    def wait(self, error: BaseException) -> None:
        """Log at most once per wait, then sleep until the next try is due or the worker stops."""
        with self._lock:
            wait = self._wait
            says = monotonic() - self._said_at >= wait
            if says:
                self._said_at = monotonic()
                self._wait = min(wait * 2, LONGEST_WAIT)
        if says:  # without the lock: a log handler may block
            logger.warning(
                "database lost (%s); trying again in %.2g s",
                " ".join(str(error).split())[:200] or type(error).__name__,
                wait,
                extra={"event": "database_lost"},
            )
        self._stop.wait(wait)

    def wait_quietly(self) -> None:
        """Sleep for the first wait, or until the worker stops."""
        self._stop.wait(FIRST_WAIT)

    def stopped(self) -> bool:
        """Say whether the worker stops: nothing waits any more."""
        return self._stop.is_set()

    def over(self) -> None:
        """Note that the database answers: the next outage begins with a short wait again."""
        if self._wait != FIRST_WAIT:
            with self._lock:
                again, self._wait = self._wait != FIRST_WAIT, FIRST_WAIT
            if again:
                logger.info("database is back", extra={"event": "database_back"})
