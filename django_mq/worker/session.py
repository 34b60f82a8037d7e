"""The connection of an executor: Django's, watched by a lazy savepoint, and always recoverable."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import transaction
from django.db.utils import Error as DjangoDatabaseError
from psycopg.pq import TransactionStatus

from django_mq.worker.database import statement_cursor, taking_back
from django_mq.worker.savepoint import LazySavepoint

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("django_mq")

#: What a statement may raise, through Django and through the driver.
DATABASE_ERRORS = (psycopg.Error, DjangoDatabaseError)


class Session:
    """What runs slices needs of its connection."""

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        self.wrapper = wrapper
        self.alias = wrapper.alias
        self.savepoint = LazySavepoint(wrapper)
        self._ready: transaction.Atomic | None = None

    def close(self) -> None:
        """Give the connection back as it was."""
        self.stand_down()
        self.savepoint.unwatch()

    def get_ready(self) -> None:
        """Enter the next transaction's block now, while nobody waits for it.

        Nothing is sent to the server, and a connection that is not there is not made.
        """
        self.make_clean()
        if self._ready is None and self.wrapper.connection is not None:
            block = transaction.atomic(using=self.alias, durable=True)
            try:
                block.__enter__()
                self._ready = block
            except DATABASE_ERRORS:
                self.reset()

    def stand_down(self) -> None:
        """Leave the block that `get_ready()` entered."""
        if self._ready is not None:
            with self.block():
                pass

    def block(self) -> AbstractContextManager[None]:
        """Return the atomic block of a transaction: the one that is ready, or a new one."""
        ready, self._ready = self._ready, None
        return (
            transaction.atomic(using=self.alias, durable=True) if ready is None else _Entered(ready)
        )

    def connect(self) -> psycopg.Connection[Any]:
        """Return the driver's connection, a new one if there is none."""
        if self.wrapper.connection is None:
            self.wrapper.ensure_connection()
        driver: psycopg.Connection[Any] = self.wrapper.connection
        return driver

    def cursor(self) -> psycopg.Cursor[Any]:
        """Return a cursor for our own statements.

        They are planned each time, by the table as it is. A plan that the server kept from when
        the table was empty scans it from end to end when it is large: 33 ms for a lock and 29 for
        an ack beside 300,000 rows, until somebody analyzes the table. The worker's other
        connections may forbid that by settings; this one is the handlers'.
        """
        self.connect()
        return statement_cursor(self.wrapper.connection)

    def is_within(self) -> bool:
        """Say whether somebody else's transaction is open: a test's."""
        return self.wrapper.in_atomic_block

    def take_hooks(self) -> list[Any]:
        """Return the on_commit hooks and forget them: we run them, each by itself."""
        hooks, self.wrapper.run_on_commit = self.wrapper.run_on_commit, []
        return hooks

    def make_clean(self) -> None:
        """Drop the connection if somebody (a hook, a receiver) left it other than idle."""
        if self._ready is not None:
            return  # it was clean then
        wrapper, driver = self.wrapper, self.wrapper.connection
        if driver is not None and (
            driver.closed
            or driver.info.transaction_status != TransactionStatus.IDLE
            or not driver.autocommit
            or not wrapper.autocommit
            or wrapper.in_atomic_block
        ):
            self.reset()

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """Undo what is SET for the session in this block, by hooks and receivers.

        Only if they used the connection at all: else it would cost each slice of 400 messages a
        tenth of its time. And not within a transaction of somebody else's.
        """
        if self.is_within():
            yield
            return
        self.savepoint.watch()
        try:
            yield
        finally:
            self.savepoint.disarm()
        if self.savepoint.opened:
            self._take_back()

    def _take_back(self) -> None:
        """Undo what was SET for the session; if that fails the connection is dropped."""
        self.make_clean()
        try:
            psycopg.ClientCursor(self.connect()).execute(taking_back(self.wrapper))
        except DATABASE_ERRORS:
            self.reset()

    def reset(self) -> None:
        """Drop the connection, whatever state it is in; the next use makes a new one."""
        wrapper = self.wrapper
        self._ready = None
        self.savepoint.disarm()
        with contextlib.suppress(*DATABASE_ERRORS):
            wrapper.close()
        wrapper.connection = None
        wrapper.in_atomic_block = False
        wrapper.closed_in_transaction = False
        wrapper.needs_rollback = False
        wrapper.savepoint_ids = []
        wrapper.atomic_blocks = []
        wrapper.run_on_commit = []


class _Entered:
    """A block that was entered before."""

    def __init__(self, block: transaction.Atomic) -> None:
        self._block = block

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: Any) -> None:
        self._block.__exit__(*raised)


def run_hooks(hooks: list[Any]) -> None:
    """Run on_commit hooks; the commit stands, whatever they raise."""
    for _, hook, _ in hooks:
        try:
            hook()
        except BaseException:  # SystemExit too: a hook does not end the worker
            logger.exception(
                "an on_commit hook failed; its message is acked", extra={"event": "hook_failed"}
            )
