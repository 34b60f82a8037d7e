"""Lend a test's connection to a handler that expects to run outside a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import TransactionStatus

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor.connections import drop_connection
from django_mq.executor.savepoint import LEFT_OPEN

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

NAME = "django_mq_guard"

SWALLOWED = """\
the handler swallowed a database error. A worker runs it outside any transaction, where that \
is harmless; in a TestCase it breaks the transaction of the test: use TransactionTestCase, \
or wrap the statement in transaction.atomic()"""
ENDED = """\
the handler closed the connection, or ended the transaction of the test: use TransactionTestCase \
for a handler that does"""


class TransactionGuard:
    """Keeps a test's transaction usable after any handler that is not atomic.

    In a worker each statement of such a handler is its own transaction, and a failed one does no
    harm. In a TestCase all of them belong to the transaction of the test, so they run behind a
    savepoint. The savepoint is not one of Django's: that would be an `atomic()` block, in which the
    durable block of `finish()` could not begin.
    """

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        wrapper.ensure_connection()
        self._wrapper = wrapper
        self._driver = wrapper.connection
        #: Whether the handler's writes were rolled back, including those of `finish()`.
        self.undone = False
        self._within = wrapper.in_atomic_block or not wrapper.get_autocommit()
        self._depth = len(wrapper.savepoint_ids), len(wrapper.atomic_blocks)
        if self._within:
            self._run(f"savepoint {NAME}")

    def end(self, error: BaseException | None) -> BaseException | None:
        """Return the handler's error, or one for the state that it left and that was rolled back.

        Raises HandlerBrokeTransaction if the test's transaction has ended.
        """
        if self._within and not self._is_here():
            raise HandlerBrokeTransaction(ENDED) from error
        wrapper = self._wrapper
        if self._depth != (len(wrapper.savepoint_ids), len(wrapper.atomic_blocks)):
            self._undo()
            return error or HandlerBrokeTransaction(LEFT_OPEN)
        if not self._within:
            return error
        if self._status() == TransactionStatus.INERROR or wrapper.needs_rollback:
            self._undo()
            return error or HandlerBrokeTransaction(SWALLOWED)
        self._run(f"release savepoint {NAME}")
        return error

    def _is_here(self) -> bool:
        return (
            self._wrapper.connection is self._driver
            and not self._driver.closed
            and self._status() in (TransactionStatus.INTRANS, TransactionStatus.INERROR)
        )

    def _undo(self) -> None:
        self.undone = self._within
        wrapper = self._wrapper
        savepoints, blocks = self._depth
        del wrapper.savepoint_ids[savepoints:], wrapper.atomic_blocks[blocks:]
        wrapper.needs_rollback = False
        if self._within:
            self._run(f"rollback to savepoint {NAME}; release savepoint {NAME}")
            return
        drop_connection(wrapper)

    def _run(self, statements: str) -> None:
        psycopg.ClientCursor(self._driver).execute(statements)

    def _status(self) -> TransactionStatus:
        return TransactionStatus(self._driver.info.transaction_status)
