"""Statements of the worker itself, under limits of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.executor.connections import (
    is_idle,
    plain_connection,
    prepare_statements,
    roll_back,
    statement_cursor,
)
from django_mq.executor.simple_protocol import simple_query
from django_mq.executor.watchdog import STALL_MARGIN, Link
from django_mq.store import Cursor
from django_mq.store import limits as server_limits
from django_mq.store.limits import Limits
from django_mq.store.server_errors import LOST

# Each of our statements has one good plan, by its index, whatever the statistics say; planning a
# claim each time takes 0.3 of its 2.4 ms. Without the last four settings, the generic plan of a
# claim prepared on an empty table hashes a whole large table later. With them, a necessary scan of
# a small table has so high a cost that JIT would compile it: 70 ms for a statement of 1 ms.
ONE_PLAN = """
set plan_cache_mode = force_generic_plan; set jit = off;
set enable_seqscan = off; set enable_bitmapscan = off;
set enable_hashjoin = off; set enable_mergejoin = off
"""


Row = TypeVar("Row")
Result = TypeVar("Result")


class Statements:
    """A connection for statements of the worker itself, each in its own transaction.

    They run under `limits`, whatever the role sets. They are prepared on the server, unless the
    alias goes through a transaction pooler (marked in Django's settings by
    `DISABLE_SERVER_SIDE_CURSORS`); then the limits are sent with each transaction.
    """

    def __init__(
        self, alias: str, *, limits: Limits | None = None, link: Link | None = None
    ) -> None:
        self._alias = alias
        self.limits = limits or Limits()
        self.link = link or Link()
        self._direct = True
        self._wrapper: BaseDatabaseWrapper | None = None
        self._cursor: RepeatingCursor | None = None

    def cursor(self) -> Cursor:
        """Return a cursor; connects when needed. Raises the errors in LOST."""
        wrapper = self._wrapper
        if wrapper is None:
            wrapper = self._wrapper = plain_connection(self._alias, self.link)
        if wrapper.connection is None or wrapper.connection.closed:
            self._connect(wrapper)
        return self._cursor  # type: ignore[return-value]

    def _connect(self, wrapper: BaseDatabaseWrapper) -> None:
        self.link.seconds = self.limits.statement + STALL_MARGIN
        try:
            wrapper.close()
            wrapper.connect()
            driver = wrapper.connection
            self._direct = prepare_statements(wrapper)
            if self._direct:
                version = driver.info.server_version
                own = server_limits.set_for_session(self.limits, server_version=version)
                driver.execute(f"{own}; {ONE_PLAN}")
        except BaseException:
            self.close()
            raise
        self._cursor = RepeatingCursor(driver, self.limits, limited=not self._direct)

    def allow(self, seconds: float) -> None:
        """Allow each later statement on this connection `seconds`.

        Behind a transaction pooler, this changes nothing: each statement has the limits of this
        object, except VACUUM, which no transaction can limit.
        """
        self.link.seconds = seconds + STALL_MARGIN
        if self._direct:
            self.cursor().connection.execute(server_limits.allow_session(seconds))

    def transaction(self, *, lock: float | None = None) -> AbstractContextManager[Any]:
        """Return a block whose statements are one transaction; call `cursor()` first.

        `lock`: seconds that each of its statements waits for a lock.
        """
        own = self.limits if lock is None else self.limits._replace(lock=lock)
        return transaction(self._wrapper.connection, own)  # type: ignore[union-attr]

    def is_alive(self) -> bool:
        """Return whether the connection survived the last error; if so, the server answered."""
        driver = self._wrapper.connection if self._wrapper else None
        return driver is not None and not driver.closed

    def is_idle(self) -> bool:
        """Return whether the connection exists, and no transaction is open."""
        return self.is_alive() and is_idle(self._wrapper.connection)  # type: ignore[union-attr]

    def close(self) -> None:
        """Close the connection; the next statement opens a new one."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            with contextlib.suppress(*LOST):
                wrapper.close()


class RepeatingCursor:
    """Runs each statement on a cursor of its own.

    A psycopg cursor remembers how to write the parameters and read the columns of its last
    statement. Finding that out again takes a sixth of a claim of one message.

    `limited`: the session does not have the `limits`, so they are sent with each statement that
    runs outside a transaction.
    """

    def __init__(self, driver: psycopg.Connection[Any], limits: Limits, *, limited: bool) -> None:
        self.connection = driver
        self.limits = limits
        self._limited = limited
        self._cursors: dict[str, psycopg.Cursor[Any]] = {}
        self._last: psycopg.Cursor[Any]

    def execute(self, sql: str, params: Any = None) -> psycopg.Cursor[Any]:
        cursor = self._cursors.get(sql)
        if cursor is None:
            cursor = self._cursors[sql] = statement_cursor(self.connection)
        self._last = cursor
        if self._limited and is_idle(self.connection):
            with one_round_trip(self.connection, self.limits):
                return cursor.execute(sql, params)
        return cursor.execute(sql, params)

    @property
    def rowcount(self) -> int:
        return self._last.rowcount

    def fetchall(self) -> list[Any]:
        return self._last.fetchall()

    def fetchone(self) -> Any:
        return self._last.fetchone()


@contextmanager
def one_round_trip(driver: psycopg.Connection[Any], own: Limits) -> Iterator[None]:
    """Send the block's statements in a transaction under `own` limits, all in one round trip."""
    try:
        # An old libpq has no pipelines: then this takes several round trips.
        with driver.pipeline() if psycopg.Pipeline.is_supported() else nullcontext():
            driver.execute(server_limits.BEGIN)
            server_limits.apply(driver, own)
            yield
            driver.execute("commit")
    except BaseException:
        roll_back(driver)
        raise


@contextmanager
def transaction(driver: psycopg.Connection[Any], own: Limits) -> Iterator[None]:
    """Run the block in a transaction of the worker alone, under `own` limits."""
    try:
        simple_query(driver, server_limits.begin(own))
        yield
        # The server may cancel BEGIN or COMMIT as well, which leaves the transaction open.
        simple_query(driver, "commit")
    except BaseException:
        roll_back(driver)
        raise


def within_transaction(cursor: Cursor) -> AbstractContextManager[Any]:
    """Return a block whose statements are one transaction: the open one, or a new one.

    A single statement needs no block: it is a transaction, under the same limits.
    """
    driver: psycopg.Connection[Any] = cursor.connection
    if not is_idle(driver):
        return nullcontext()
    if isinstance(cursor, RepeatingCursor):
        return transaction(driver, cursor.limits)
    return driver.transaction()


def skip_refused_rows(
    change: Callable[[Sequence[Row]], Iterable[Result]],
    rows: Sequence[Row],
    refused: Callable[[Row, Exception], None] = lambda row, error: None,
    *,
    errors: type[Exception] = psycopg.Error,
) -> list[Result]:
    """Return what `change(rows)` returns; a row that the server refuses does not stop the others.

    A refused statement changed nothing, so it is tried again with each half of its rows; `refused`
    is called with each refused row and its error. Raises the errors of a lost database, and those
    that are none of `errors`.
    """
    try:
        return list(change(rows))
    except LOST:
        raise
    except errors as error:
        if not rows:
            raise  # no row explains the error
        if len(rows) == 1:
            refused(rows[0], error)
            return []
    half = len(rows) // 2
    return [
        result
        for part in (rows[:half], rows[half:])
        for result in skip_refused_rows(change, part, refused, errors=errors)
    ]
