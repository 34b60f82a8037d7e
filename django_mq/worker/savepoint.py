"""A savepoint that is opened when a handler first touches its connection, and not before.

Most of what a handler costs, if it does not write, would be its savepoint: 145 us opened for
each message against 5 us when none is needed.
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
from django_mq.worker.database import taking_back

# Only those that this login could name: the temporary tables of other sessions have some too.
DEFERRABLE = """
select n.nspname, c.conname
  from pg_constraint c
  join pg_namespace n on n.oid = c.connamespace
 where c.condeferrable and not c.condeferred
   and not pg_is_other_temp_schema(n.oid) and has_schema_privilege(n.oid, 'usage')
"""


class TransactionGone(Exception):
    """A handler ended the transaction it ran in, or its connection."""


class ConstraintGone(Exception):
    """A constraint was dropped since the connection was made; the handler may simply run again."""

    sqlstate = "40001"  # as good as a conflict with whoever dropped it


class LazySavepoint:
    """Stands between one handler at a time and the transaction of its slice.

    `begin()` once a transaction, `arm()` before each handler, then `keep()` or `undo()`. Who wrote
    is mostly followed by one who writes: its savepoint is opened along with the end of this one,
    which saves a third of the round trips.
    """

    NAME = "django_mq_delivery"
    _open = f"savepoint {NAME}".encode()
    _undo = f"rollback to savepoint {NAME}; release savepoint {NAME}".encode()

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        if "mq_savepoint" in wrapper.__dict__:
            raise RuntimeError("drain() cannot be called by a handler or hook that drain() runs")
        self.wrapper = wrapper
        #: The handler touched its connection, and what it does is behind a savepoint.
        self.opened = False
        self._refused: BaseException | None = None  # what `before` raised at its first use
        self._armed = False
        self._waiting = False  # a savepoint is open behind which nothing was done
        self._before: Callable[[], object] | None = None
        self._driver: Any = None
        self._cursor: Any = None  # a psycopg.ClientCursor once it has begun
        self._initially_immediate: list[Any] | None = None
        self._release = b""
        self._release_for: object = None
        self._depth = 0, 0
        self._plain_class = type(wrapper)
        wrapper.__class__ = _watched(self._plain_class)
        wrapper.__dict__["mq_savepoint"] = self

    def unwatch(self) -> None:
        """Give the connection back as it was."""
        self._armed = False
        if self._driver is not None:
            self._driver.__dict__.pop("wait", None)
        self.wrapper.__class__ = self._plain_class
        del self.wrapper.__dict__["mq_savepoint"]

    def knows(self, driver: Any) -> bool:
        """Say whether `begin()` needs nothing of the server."""
        return driver is self._driver and self._initially_immediate is not None

    def begin(
        self,
        settings: dict[str, str],
        *,
        own_session: bool,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Take the connection as it is now, inside its transaction, for the coming handlers.

        `settings` are the session settings that hold for this transaction alone. A session that
        is not our `own_session` (a test's) keeps what handlers SET. `before` is called before a
        handler sends anything; while it raises, nothing can be sent.
        """
        driver = self.wrapper.__dict__["connection"]
        self._waiting = False
        self._before = before
        if driver is not self._driver:
            self._watch_driver(driver)
            self._driver = driver
            self._cursor = psycopg.ClientCursor(driver)
            self._initially_immediate = None
        if self._initially_immediate is None:
            self._initially_immediate = self._cursor.execute(DEFERRABLE).fetchall()
            self._release_for = None
        self._depth = len(self.wrapper.savepoint_ids), len(self.wrapper.atomic_blocks)
        wanted = settings, own_session, self.wrapper.timezone_name
        if wanted != self._release_for:  # writing it anew would cost 24 us a slice
            self._release_for = wanted
            self._release = self._closing_statements(settings, own_session).as_bytes(driver)

    def _watch_driver(self, driver: Any) -> None:
        """Open the savepoint too when somebody uses a cursor that was made before `arm()`.

        Everything that a psycopg connection sends passes its `wait()`.
        """
        plain_wait = driver.wait

        def wait(*args: Any, **kwargs: Any) -> Any:
            if self._armed and driver is self._driver:
                self.open()
            return plain_wait(*args, **kwargs)

        driver.wait = wait

    def arm(self) -> None:
        """From now on, the first use of the connection opens the savepoint."""
        self.opened = False
        self._refused = None
        self._armed = True

    def watch(self) -> None:
        """From now on, `opened` says whether somebody used the connection; no savepoint is.

        Of a connection that was made since `begin()` nobody can say that they did not.
        """
        self.arm()
        self._before = None
        self._waiting = True
        if self.wrapper.__dict__["connection"] is not self._driver:
            self.open()

    def disarm(self) -> None:
        """What touches the connection from now on is not the handler."""
        self._armed = False

    def open(self) -> None:
        """Open the savepoint, unless nobody is being watched."""
        if self._armed:
            self._armed = False
            if self._before is not None or not self._waiting:
                self._let_pass()
            self._waiting = False
            self.opened = True

    def _let_pass(self) -> None:
        # A handler's own cursor may be what brought us here, and then it has the driver's lock:
        # so nothing here goes through a cursor. If nobody has it, other threads wait for us.
        held = self._driver.lock.acquire(blocking=False)
        try:
            if self._before is not None:
                self._before()
            if not self._waiting:
                result = self._driver.pgconn.exec_(self._open)
                if result.status != ExecStatus.COMMAND_OK:
                    raise psycopg.errors.error_from_result(result)
            self._before = self._refused = None
        except BaseException as error:
            self._refused = error
            self._armed = self._before is not None  # nothing passes, however often it is tried
            raise
        finally:
            if held:
                self._driver.lock.release()

    def keep(self, *, more: bool = False) -> None:
        """Keep what the handler wrote; its deferred constraints are checked now.

        `more`: another handler follows in this transaction.

        Raises what a violated constraint raises, HandlerBrokeTransaction when the handler left
        the transaction in a state that cannot be committed, TransactionGone when it ended it.
        """
        self._armed = False
        if self._refused is not None:
            raise self._refused  # the handler swallowed it
        if self.opened:
            self._must_be_here()
        if self.opened and self._driver.info.transaction_status == TransactionStatus.INERROR:
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
        if self.opened:
            try:
                self._run(self._release + b"; " + self._open if more else self._release)
                self._waiting = more
            except ProgrammingError as error:
                if not isinstance(error.__cause__, psycopg.errors.UndefinedObject):
                    raise
                self._initially_immediate = None
                raise ConstraintGone(str(error)) from error

    def leave(self) -> None:
        """No handler follows: close a savepoint behind which nothing was done.

        Else the settle would be in it: rows that are locked by a transaction and changed by its
        subtransaction cost a multixact each time, and all who meet them a look at it.
        """
        self._before = None
        if self._waiting:
            self._waiting = False
            self._run(b"release savepoint " + self.NAME.encode())

    def undo(self) -> None:
        """Take back what the handler wrote. Raises TransactionGone when it ended it."""
        self._armed = False
        if self.opened:
            self._must_be_here()
            self._run(self._undo)
        savepoints, blocks = self._depth
        del self.wrapper.savepoint_ids[savepoints:], self.wrapper.atomic_blocks[blocks:]
        self.wrapper.needs_rollback = False
        self.wrapper.rollback_exc = None  # type: ignore[attr-defined]

    def _must_be_here(self) -> None:
        if (
            self.wrapper.__dict__["connection"] is not self._driver
            or self.wrapper.closed_in_transaction
            or self._driver.closed
        ):
            raise TransactionGone("its connection was closed")
        if self._driver.autocommit or self._driver.info.transaction_status in (
            TransactionStatus.IDLE,
            TransactionStatus.UNKNOWN,
        ):
            raise TransactionGone("it was committed or rolled back")

    def _run(self, statements: bytes) -> None:
        with self.wrapper.wrap_database_errors:
            try:
                self._cursor.execute(statements)
            except (
                psycopg.errors.InvalidSavepointSpecification,
                psycopg.errors.NoActiveSqlTransaction,
            ) as error:
                raise TransactionGone("it was committed or rolled back") from error

    def _closing_statements(self, settings: dict[str, str], own_session: bool) -> sql.Composed:
        # Deferred constraints would otherwise fail at COMMIT and take the slice along. What the
        # handler SET for its session is taken back, and with it ours, which are set again.
        steps = [
            sql.SQL("set constraints all immediate"),
            sql.SQL("set constraints all deferred"),
            *(
                sql.SQL("set constraints {} immediate").format(sql.Identifier(*name))
                for name in self._initially_immediate or ()
            ),
            sql.SQL("release savepoint {}").format(sql.Identifier(self.NAME)),
        ]
        if not own_session:
            return sql.SQL("; ").join(steps)
        steps.append(taking_back(self.wrapper))
        steps.extend(
            sql.SQL("set local {} = {}").format(sql.Identifier(name), sql.Literal(value))
            for name, value in settings.items()
        )
        return sql.SQL("; ").join(steps)


def _watched(base: type[BaseDatabaseWrapper]) -> type[BaseDatabaseWrapper]:
    """Return a subclass of `base` whose driver connection cannot be reached unseen.

    Every cursor, and everybody who asks for the driver's connection, passes this property.
    """

    def get(self: BaseDatabaseWrapper) -> Any:
        savepoint: LazySavepoint | None = self.__dict__.get("mq_savepoint")
        if savepoint is not None and savepoint._armed:
            savepoint.open()
        return self.__dict__["connection"]

    def set_(self: BaseDatabaseWrapper, value: Any) -> None:
        self.__dict__["connection"] = value

    return type(
        base.__name__, (base,), {"connection": property(get, set_), "__module__": base.__module__}
    )
