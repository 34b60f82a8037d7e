"""A savepoint that is opened when a handler first uses its connection, and not before.

If it were always opened, the savepoint would be most of the cost of a handler that does not write:
145 us per message, against 5 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import ProgrammingError
from psycopg.pq import ExecStatus, TransactionStatus

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor.savepoint_statements import (
    NEXT_SAVEPOINT,
    RELEASE_UNUSED,
    SavepointStatements,
)
from django_mq.executor.watched_connection import WatchedConnection

LEFT_OPEN = "the handler left an atomic() block open: leave each with the with statement"


class TransactionEnded(Exception):
    """A handler ended the transaction in which it ran, or its connection was lost."""


class ConstraintDropped(Exception):
    """A constraint was dropped since the connection was made: the handler runs again."""

    sqlstate = "40001"  # handled like a conflict with the transaction that dropped it


class LazySavepoint:
    """Stands between the transaction of a slice and the handler that runs in it.

    Call `start()` once per slice, `arm()` before each handler, then `keep()` or `roll_back()`. The
    first use of the connection in a slice also begins the transaction. A handler that writes is
    usually followed by another one, so the query that ends its savepoint also opens the next, which
    saves a third of the round trips.
    """

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        self.wrapper = wrapper
        #: Whether the handler used its connection; its writes are then behind a savepoint.
        self.opened = False
        #: The error of the first use. Every later use of the connection raises it again.
        self.refused: BaseException | None = None
        self._watched = WatchedConnection(wrapper, self.open)
        self._unused = False  # a savepoint is open, but nothing has used it
        self._only_watching = False  # no handler runs: a use of the connection opens no savepoint
        self._begin: Callable[[], object] | None = None
        self._cursor: Any = None  # a psycopg.ClientCursor after the first start
        self._statements = SavepointStatements(wrapper)
        self._depth = 0, 0

    def unwatch(self) -> None:
        """Give the connection back as it was."""
        self._watched.unwatch()

    def start(
        self,
        settings: dict[str, str],
        *,
        own_session: bool,
        begin: Callable[[], object] | None,
    ) -> None:
        """Prepare for the handlers of a slice, in its atomic block.

        `settings` hold for this transaction alone. If the session is not our `own_session` but a
        test's, it keeps what handlers SET. When a handler first uses the connection, `begin` begins
        the transaction and opens the first savepoint.
        """
        self._unused = self._only_watching = False
        self._begin = begin
        self.refused = None
        self._watched.take_driver()
        if self._cursor is None or self._cursor.connection is not self._watched.driver:
            self._cursor = psycopg.ClientCursor(self._watched.driver)
            self._statements.forget()
        self._depth = len(self.wrapper.savepoint_ids), len(self.wrapper.atomic_blocks)
        self._statements.compose(settings, own_session=own_session)

    def begun(self) -> None:
        """Note that the transaction began before a handler used it; no savepoint is open."""
        self._begin = None

    def arm(self) -> None:
        """From now on, the first use of the connection opens the savepoint."""
        self.opened = False
        self.refused = None
        self._watched.armed = True

    def watch(self) -> None:
        """From now on, `opened` says whether the connection was used; no savepoint is opened.

        If the connection was made since the last watch, it counts as used.
        """
        self.arm()
        self._begin = None
        self._only_watching = True
        if self._watched.take_driver():
            self.open()

    def disarm(self) -> None:
        """Stop watching: from now on the handler does not use the connection."""
        self._watched.armed = False

    def restore_driver(self) -> None:
        """Give the driver its options back, outside a transaction of ours."""
        self._watched.restore_driver()

    def open(self) -> None:
        """Note the use of the connection; open the savepoint, unless one is open or not wanted."""
        if self._watched.armed:
            self._watched.armed = False
            if not (self._unused or self._only_watching):
                self._begin_or_open()
            self._unused = False
            self.opened = True

    def _begin_or_open(self) -> None:
        if self.refused is not None:
            self._watched.armed = True
            raise self.refused
        # The handler's own cursor may have called this, and then it holds the driver's lock: so
        # nothing here uses a cursor. If the lock is free, take it, so that other threads wait.
        held = self._watched.driver.lock.acquire(blocking=False)
        try:
            if self._begin is not None:
                self._begin()
                self._begin = None
                return
            result = self._watched.driver.pgconn.exec_(self._statements.open)
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)
        except BaseException as error:
            self.refused = error
            self._watched.armed = True
            raise
        finally:
            if held:
                self._watched.driver.lock.release()

    def keep(self, *, more: bool = False) -> None:
        """Keep the handler's writes; check its deferred constraints now.

        `more`: another handler follows in this transaction.

        Raises the error of a violated constraint, HandlerBrokeTransaction if the handler left the
        transaction in a state that cannot be committed, and TransactionEnded if it ended the
        transaction.
        """
        self._watched.armed = False
        if self.refused is not None:
            raise self.refused  # the handler swallowed it
        if self.opened:
            self._must_be_here()
        self._must_be_whole()
        if self.opened:
            self._watched.restore_driver()
            statements = self._statements
            try:
                release = statements.release or statements.compose_release(self._cursor)
                # The reset leaves the limits of handlers in force.
                self._run(release + (NEXT_SAVEPOINT if more else statements.worker_limits))
                self._unused = more
            except ProgrammingError as error:
                if not isinstance(error.__cause__, psycopg.errors.UndefinedObject):
                    raise
                statements.forget_constraints()
                raise ConstraintDropped(str(error)) from error

    def leave(self) -> None:
        """Release an unused savepoint after the last handler.

        Otherwise the settle would run inside the savepoint. A row that a transaction locks and its
        subtransaction changes gets a multixact, which each session that meets the row must look up.
        """
        if self._unused:
            self._unused = False
            self._run(RELEASE_UNUSED + self._statements.worker_limits)

    def roll_back(self) -> None:
        """Undo the handler's writes. Raises TransactionEnded if it ended the transaction."""
        self._watched.armed = False
        if self.opened:
            self._must_be_here()
            self._watched.restore_driver()
            self._run(self._statements.rollback)
        savepoints, blocks = self._depth
        del self.wrapper.savepoint_ids[savepoints:], self.wrapper.atomic_blocks[blocks:]
        self.wrapper.needs_rollback = False
        self.wrapper.rollback_exc = None  # type: ignore[attr-defined]

    def _must_be_here(self) -> None:
        if (
            self._watched.was_replaced()
            or self.wrapper.closed_in_transaction
            or self._watched.driver.closed
        ):
            raise TransactionEnded("its connection was closed")
        if self._watched.driver.info.transaction_status == TransactionStatus.ACTIVE:
            # Its generator holds the driver's lock: a statement, ROLLBACK too, would wait for ever.
            self.wrapper.close()
            raise TransactionEnded("it left a stream() or a COPY unfinished, so it was closed")
        if self._watched.driver.autocommit or self._watched.driver.info.transaction_status in (
            TransactionStatus.IDLE,
            TransactionStatus.UNKNOWN,
        ):
            raise TransactionEnded("it was committed or rolled back")

    def _must_be_whole(self) -> None:
        """Raise HandlerBrokeTransaction unless the transaction can continue and be committed."""
        if (
            self.opened
            and self._watched.driver.info.transaction_status == TransactionStatus.INERROR
        ):
            raise HandlerBrokeTransaction(
                "the handler swallowed a database error: let it raise, or wrap the statement in"
                " transaction.atomic()"
            )
        if self._depth != (len(self.wrapper.savepoint_ids), len(self.wrapper.atomic_blocks)):
            raise HandlerBrokeTransaction(LEFT_OPEN)
        if self.wrapper.needs_rollback:
            raise HandlerBrokeTransaction(
                "the handler marked its transaction for rollback (set_rollback, or an error in"
                " an inner block) and returned: raise instead"
            )

    def _run(self, statements: bytes) -> None:
        with self.wrapper.wrap_database_errors:
            try:
                self._cursor.execute(statements)
            except (
                psycopg.errors.InvalidSavepointSpecification,
                psycopg.errors.NoActiveSqlTransaction,
            ) as error:
                raise TransactionEnded("it was committed or rolled back") from error
