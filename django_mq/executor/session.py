"""The connection of an executor: Django's, watched by a lazy savepoint, always recoverable."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import copy_context
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import OperationalError, connections, transaction
from psycopg.pq import TransactionStatus

from django_mq.conf.error_logs import log_failure
from django_mq.executor import created_sessions
from django_mq.executor.connections import (
    DATABASE_ERRORS,
    drop_connection,
    is_idle,
    reset_session,
    roll_back,
    statement_cursor,
)
from django_mq.executor.savepoint import LazySavepoint
from django_mq.executor.simple_protocol import simple_query
from django_mq.executor.statements import RepeatingCursor
from django_mq.executor.thread_connections import clean_up
from django_mq.executor.watchdog import Link
from django_mq.messages import Delivery, set_current
from django_mq.store import Cursor, frozen_owner
from django_mq.store.driver import DISCARD, may_prepare
from django_mq.store.limits import STAY_WHILE_IDLE, Limits

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


logger = logging.getLogger("django_mq")

#: Seconds after which a firewall may have dropped a silent connection.
STALE_AFTER = 60.0
#: Seconds for which such a connection may take to answer: a message waits meanwhile.
PROBE_SECONDS = 5.0


class Session:
    """The connection on which slices and non-atomic handlers run."""

    def __init__(
        self, wrapper: BaseDatabaseWrapper, *, borrowed: bool = False, link: Link | None = None
    ) -> None:
        """Watch the connection. A `borrowed` one is a test's: its session is left alone.

        `link` bounds the waits of the worker's own statements.
        """
        self.wrapper = wrapper
        self.borrowed = borrowed
        self.link = link or Link()
        self.alias = wrapper.alias
        self.savepoint = LazySavepoint(wrapper)
        self._ready: contextlib.ExitStack | None = None
        self._recorded: object = None
        self._staying: object = None
        self._active_at = float("-inf")

    def unwatch(self) -> None:
        """Give the connection back as it was."""
        self.leave_block()
        self.savepoint.unwatch()

    def prepare_block(self) -> None:
        """Enter the block of the next transaction now, while no message waits for it.

        Sends nothing to the server, and does not connect.
        """
        self.drop_unless_idle()
        if self._ready is None and self.wrapper.connection is not None:
            block = contextlib.ExitStack()
            try:
                block.enter_context(transaction.atomic(using=self.alias, durable=True))
                self._ready = block
            except DATABASE_ERRORS:
                self.close()

    def leave_block(self) -> None:
        """Leave the block that `prepare_block()` entered."""
        if self._ready is not None:
            with self.block():
                pass

    def block(self) -> AbstractContextManager[object]:
        """Return the atomic block of a transaction: the prepared one, or a new one."""
        ready, self._ready = self._ready, None
        return transaction.atomic(using=self.alias, durable=True) if ready is None else ready

    def transaction(self) -> AbstractContextManager[None]:
        """Return the atomic block of a transaction in which no handler runs."""
        self.leave_block()
        return transaction.atomic(using=self.alias, durable=True)

    def connect(self) -> psycopg.Connection[Any]:
        """Return the driver's connection; connects if there is none."""
        if self.wrapper.connection is None:
            self.wrapper.ensure_connection()
            self.record_activity()
        driver: psycopg.Connection[Any] = self.wrapper.connection
        if driver is not self._staying and is_idle(driver):
            self._stay_while_idle(driver)
        return driver

    def _stay_while_idle(self, driver: psycopg.Connection[Any]) -> None:
        """Keep the role's `idle_session_timeout` from ending the session between two messages.

        A handler may have opened the session: it closed the one that it was given.
        """
        own_session = not self.borrowed and may_prepare(self.wrapper)
        if own_session and simple_query(driver, STAY_WHILE_IDLE):
            created_sessions.keep(driver, "idle_session_timeout", "0")
        self._staying = driver

    def record_session(self, worker: str) -> None:
        """Add the server's session to the heartbeat of `worker`, once for each connection.

        A worker that takes over an ordered queue ends only recorded sessions. Behind a transaction
        pooler, the session serves others too. Call it outside a transaction.
        """
        driver = self.connect()
        if driver is self._recorded or self.borrowed or not may_prepare(self.wrapper):
            return
        try:
            if simple_query(driver, frozen_owner.record(worker)):
                self._recorded = driver
        except psycopg.Error as error:  # the next slice tries again
            if driver.closed:
                raise
            roll_back(driver)
            logger.debug("could not record the session: %s", error)

    def cursor(self) -> Cursor:
        """Return a cursor for our own statements, which run under limits of their own.

        The server plans them each time. A plan that it kept from when the table was empty scans the
        whole table when that is large: 33 ms for a lock and 29 ms for an ack with 300,000 rows,
        until the table is analyzed. The worker's other connections forbid such plans by settings;
        this connection belongs to the handlers.
        """
        driver = self.connect()
        if self.borrowed:
            return statement_cursor(driver)
        return RepeatingCursor(driver, Limits(), limited=True)

    def is_nested(self) -> bool:
        """Return whether a test's transaction is open."""
        if self.borrowed and not self.wrapper.get_autocommit():
            return True  # the test commits by hand
        return self.wrapper.in_atomic_block

    def take_hooks(self, since: int) -> list[Any]:
        """Remove and return the on_commit hooks from index `since`: the slice runs them later.

        Packages that change `Atomic` may register a hook as the block is entered. Django runs it.
        """
        hooks = self.wrapper.run_on_commit
        self.wrapper.run_on_commit = hooks[:since]
        return hooks[since:]

    def drop_unless_idle(self) -> None:
        """Drop the connection if a hook or a receiver did not leave it idle."""
        if self._ready is not None:
            return  # it was clean at that point
        wrapper, driver = self.wrapper, self.wrapper.connection
        if driver is not None and (
            driver.closed
            or driver.info.transaction_status != TransactionStatus.IDLE
            or not driver.autocommit
            or not wrapper.autocommit
            or wrapper.in_atomic_block
        ):
            self.close()

    @contextlib.contextmanager
    def reset_if_used(self) -> Iterator[None]:
        """Reset what hooks and receivers leave in the session during this block.

        The sessions on other aliases are reset, too; but only sessions that were used, since a
        reset takes a tenth of the time of a slice of 400 messages. Never within a test's
        transaction.
        """
        if self.borrowed or self.is_nested():
            yield
            return
        self.savepoint.watch()
        self.link.in_handler = True
        try:
            yield
        finally:
            self.link.in_handler = False
            self.savepoint.disarm()
        if self.savepoint.opened:
            self.reset()
        if len(connections.settings) > 1:
            clean_up(excluding={self.alias})

    def discard(self) -> None:
        """Drop what handlers left in the session besides settings, which their savepoints reset.

        Takes one round trip, after the commit: until then a session lock may protect their writes.
        """
        driver = self.wrapper.connection
        if self.borrowed or driver is None or not may_prepare(self.wrapper):
            return
        if driver.info.transaction_status == TransactionStatus.IDLE:
            try:
                simple_query(driver, DISCARD)
            except DATABASE_ERRORS:
                self.close()

    def reset(self) -> None:
        """Reset what was left in the session; if that fails, drop the connection."""
        self.drop_unless_idle()
        try:
            self.connect()
            self.savepoint.restore_driver()
            reset_session(self.wrapper)
        except DATABASE_ERRORS:
            self.close()

    def record_activity(self) -> None:
        """Note that the server has just answered."""
        self._active_at = monotonic()

    def check_silent(self) -> None:
        """Let the server answer if the connection has been silent for long; call it when idle.

        It may have been cut unnoticed: then this meets the error, and no handler does. A firewall
        that forgot it drops packets instead, so the answer must come within PROBE_SECONDS.
        """
        if self.borrowed or monotonic() - self._active_at <= STALE_AFTER:
            return
        driver, limit = self.connect(), self.link.seconds
        self.link.seconds = PROBE_SECONDS
        try:
            simple_query(driver, "select 1")
        finally:
            self.link.seconds = limit
        self.record_activity()

    def is_alive(self) -> bool:
        """Return whether the connection survived the last error; if so, the server answered."""
        driver = self.wrapper.connection
        return driver is not None and not driver.closed

    def close(self) -> None:
        """Drop the connection, whatever state it is in; the next use makes a new one.

        The prepared block is left first: packages that change `Atomic`, such as caches of the ORM,
        count the blocks of a thread.
        """
        self.savepoint.disarm()
        ready, self._ready = self._ready, None
        if ready is not None:
            with contextlib.suppress(*DATABASE_ERRORS):
                self.wrapper.close()
            self.wrapper.closed_in_transaction = True  # else leaving the block would connect again
        try:
            if ready is not None:
                ready.__exit__(OperationalError, OperationalError("connection dropped"), None)
        finally:
            drop_connection(self.wrapper)


def run_hooks(hooks: list[Any], delivery: Delivery, alias: str) -> None:
    """Run the on_commit hooks of the handler of `delivery`, in a copy of this thread's context.

    Messages that the hooks broadcast name `delivery` as their cause, like those of the handler.
    Errors of the hooks are logged, since the commit stands.
    """
    copy_context().run(_run_hooks, hooks, delivery, alias)


def _run_hooks(hooks: list[Any], delivery: Delivery, alias: str) -> None:
    set_current(delivery, alias)
    for _, hook, _ in hooks:
        try:
            hook()
        except BaseException as error:  # SystemExit too: a hook does not end the worker
            log_failure("hook_failed", error, "an on_commit hook failed; its message is acked")
