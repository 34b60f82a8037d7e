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
from psycopg import sql
from psycopg.pq import ExecStatus, TransactionStatus

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor import slice_limits
from django_mq.executor.connections import reset_statements
from django_mq.executor.watched_connection import WatchedConnection
from django_mq.store import open_transaction
from django_mq.store.driver import may_prepare


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

    NAME = "django_mq_delivery"

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        self.wrapper = wrapper
        #: Whether the handler used its connection; its writes are then behind a savepoint.
        self.opened = False
        #: The error of the first use. Every later use of the connection raises it again.
        self.refused: BaseException | None = None
        self._watched = WatchedConnection(wrapper, self.open)
        self._unused = False  # a savepoint is open, but nothing has used it
        self._begin: Callable[[], object] | None = None
        self._cursor: Any = None  # a psycopg.ClientCursor after the first start
        self._initially_immediate: list[Any] | None = None
        self._open = self._rollback = self._worker_limits = self._release = b""
        self._release_for: tuple[dict[str, str], bool, str | None] | None = None
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
        self._unused = False
        self._begin = begin
        self.refused = None
        self._watched.take_driver()
        if self._cursor is None or self._cursor.connection is not self._watched.driver:
            self._cursor = psycopg.ClientCursor(self._watched.driver)
            self._initially_immediate = self._release_for = None
        self._depth = len(self.wrapper.savepoint_ids), len(self.wrapper.atomic_blocks)
        wanted = settings, own_session, self.wrapper.timezone_name
        if wanted != self._release_for:  # composing it again would take 24 us per slice
            self._release_for = wanted
            self._compose(settings if own_session else None)

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
        self._unused = True
        if self._watched.take_driver():
            self.open()

    def disarm(self) -> None:
        """Stop watching: from now on the handler does not use the connection."""
        self._watched.armed = False

    def restore_driver(self) -> None:
        """Give the driver its options back, outside a transaction of ours."""
        self._watched.restore_driver()

    def open(self) -> None:
        """Open the savepoint, if a handler is being watched."""
        if self._watched.armed:
            self._watched.armed = False
            if not self._unused:
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
            result = self._watched.driver.pgconn.exec_(self._open)
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
            try:
                release = self._release or self._compose_release()
                # The reset leaves the limits of handlers in force.
                last = b"; savepoint " + self.NAME.encode() if more else self._worker_limits
                self._run(release + last)
                self._unused = more
            except ProgrammingError as error:
                if not isinstance(error.__cause__, psycopg.errors.UndefinedObject):
                    raise
                self._initially_immediate = None
                self._release = b""
                raise ConstraintDropped(str(error)) from error

    def leave(self) -> None:
        """Release an unused savepoint after the last handler.

        Otherwise the settle would run inside the savepoint. A row that a transaction locks and its
        subtransaction changes gets a multixact, which each session that meets the row must look up.
        """
        if self._unused:
            self._unused = False
            self._run(b"release savepoint " + self.NAME.encode() + self._worker_limits)

    def roll_back(self) -> None:
        """Undo the handler's writes. Raises TransactionEnded if it ended the transaction."""
        self._watched.armed = False
        if self.opened:
            self._must_be_here()
            self._watched.restore_driver()
            self._run(self._rollback)
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
            raise HandlerBrokeTransaction(
                "the handler left an atomic() block open: leave each with the with statement"
            )
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

    def _compose(self, settings: dict[str, str] | None) -> None:
        """Compose the statements around a savepoint; without `settings` no limits change.

        Outside the savepoints of handlers the worker's limits hold, inside them the role's.
        """
        own = settings is not None
        self._worker_limits = (
            f"; {slice_limits.worker_limits(settings or {})}".encode() if own else b""
        )
        opened = f"; {slice_limits.handler_limits(settings or {})}" if own else ""
        self._open = f"savepoint {self.NAME}{opened}".encode()
        rollback = f"rollback to savepoint {self.NAME}; release savepoint {self.NAME}"
        self._rollback = rollback.encode() + self._worker_limits
        self._release = b""

    def _compose_release(self) -> bytes:
        """Return the statements that end a handler's savepoint, and remember them.

        Constraints are checked here, because a deferred one would otherwise fail at COMMIT, and the
        whole slice with it. Resetting what the handler SET for its session also resets our
        settings, so they are set again.
        """
        if self._initially_immediate is None:
            with self.wrapper.wrap_database_errors:
                self._initially_immediate = open_transaction.initially_immediate(self._cursor)
        assert self._release_for is not None  # noqa: S101  (`start()` came before)
        settings, own_session, _ = self._release_for
        steps = [
            sql.SQL("set constraints all immediate"),
            sql.SQL("set constraints all deferred"),
            *(
                sql.SQL("set constraints {} immediate").format(sql.Identifier(*name))
                for name in self._initially_immediate or ()
            ),
            sql.SQL("release savepoint {}").format(sql.Identifier(self.NAME)),
        ]
        if own_session:
            if may_prepare(self.wrapper):  # the next handler may make some of the same names
                steps.append(sql.SQL("close all; discard temp"))
            steps.append(reset_statements(self.wrapper))
            steps.extend(
                sql.SQL("set local {} = {}").format(sql.Identifier(name), sql.Literal(value))
                for name, value in settings.items()
            )
        self._release = sql.SQL("; ").join(steps).as_bytes(self._watched.driver)
        return self._release
