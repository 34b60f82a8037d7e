"""PendingReply: the id of a request, whether waiting for it can succeed, and its reply."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_mq.conf import alias_of, command_on
from django_mq.exceptions import (
    CannotWait,
    RemoteError,
    ReplyTimeout,
    Unanswered,
    UnreadablePayload,
)
from django_mq.messages import Receipt, current_delivery, foreign_alias
from django_mq.outbox.blocks import own_block, testcase_block
from django_mq.outbox.options import check_integer
from django_mq.outbox.send import queue_connection
from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.requests.collecting import TIMEOUT, acollect, collect
from django_mq.store import results

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


#: Functions that run messages, called before each query: one per open block of `answering()`.
test_runners: list[Callable[[], object]] = []


class PendingReply:
    """The reply to one request, which may not have arrived yet.

    `id` is the id of the message; `PendingReply(id)` in another process, or a pickled copy, stands
    for the same reply. A reply is kept for RESULT_RETENTION and can be read repeatedly. Ids can be
    guessed: check the owner before you show a reply to a user. Raises InvalidOption for an
    impossible id, such as one that a user typed.
    """

    __slots__ = ("_alias", "_birth", "_queue", "_type", "id")

    def __init__(self, id: int, *, using: str | None = None) -> None:
        self.id = check_integer(id, "id", 1, MAX_BIGINT)
        self._alias = queue_connection(None).alias if using is None else alias_of(using)
        self._type = self._queue = ""
        self._birth: _Origin | None = None

    @classmethod
    def _of(cls, receipt: Receipt, type: str, connection: BaseDatabaseWrapper) -> PendingReply:
        """Return the pending reply to the request just stored on `connection`."""
        pending = cls(receipt.ids[0], using=connection.alias)
        pending._type, pending._queue = type, receipt.copies[0].queue
        pending._birth = _Origin(connection)
        return pending

    def result(self, timeout: float | timedelta | None = TIMEOUT) -> Any:
        """Return the handler's return value; wait for it at most `timeout` (None: for ever).

        `timeout` is seconds or a timedelta; 0 looks once. Raises

        - RemoteError if the handler failed permanently (the wait continues during retries);
        - Unanswered if no answer will come: the message expired, was held too long, cancelled,
          discarded or purged;
        - ReplyTimeout when the time is up; the reply may still come, and you can wait again;
        - CannotWait at once if no reply could come: the transaction of the request is open or was
          rolled back, or the caller is a handler of the queue that the request goes to.
        """
        return collect([self], timeout)[0]

    async def aresult(self, timeout: float | timedelta | None = TIMEOUT) -> Any:
        """Like `result()`, without blocking the event loop and without a thread per reply."""
        return (await acollect([self], timeout))[0]

    def done(self) -> bool:
        """Return whether the reply has arrived, by one query on this thread's connection.

        Raises CannotWait when no reply can come.
        """
        if self._birth is not None and self._birth.is_open():
            return False
        found = self._query_here()
        if found.answered or found.stored:
            return found.answered
        raise self._absent()

    async def adone(self) -> bool:
        """Like `done()`, for async code."""
        return await sync_to_async(self.done, thread_sensitive=True)()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PendingReply):
            return NotImplemented
        return (self.id, self._alias) == (other.id, other._alias)

    def __hash__(self) -> int:
        return hash((self.id, self._alias))

    def __repr__(self) -> str:
        return f"<PendingReply {self.id}{f' {self._type}' if self._type else ''}>"

    def __reduce__(self) -> Any:
        return _restored, (self.id, self._alias, self._type, self._queue)

    # ---- checks that need no waiting

    def _refuse(self) -> None:
        """Raise CannotWait if waiting here could not succeed."""
        if self._birth is not None and self._birth.is_open():
            delivery = current_delivery.get()
            in_handler = delivery is not None and delivery._is_atomic
            raise CannotWait(
                f"the transaction of request {self.id} is still open, so no worker can see it:"
                " wait after its atomic() block"
                f"{'; a handler that waits needs @handler(atomic=False)' if in_handler else ''}"
            )
        self._refuse_own_queue()

    def _refuse_own_queue(self) -> None:
        delivery = current_delivery.get()
        if (
            delivery is not None
            and delivery.queue == self._queue
            and foreign_alias(self._alias) is None
        ):
            raise CannotWait(
                f"handler {delivery.handler} would wait for a reply from its own queue,"
                f" {self._queue}, which its waiting could block: send the request to another queue"
            )

    def _is_answered_here(self) -> bool:
        """Return whether to query in this thread: within `answering()`, which answers in it, or in
        a TestCase's transaction, which only this thread sees.
        """
        return bool(test_runners) or testcase_block(connections[self._alias]) is not None

    def _was_born_in_test(self) -> bool:
        """Like `_is_answered_here()`, from any thread."""
        born_within = self._birth is not None and self._birth.is_within_test
        return bool(test_runners) or born_within

    def _query_here(self) -> results.ReplyState:
        """Query on the connection of this thread."""
        for run in test_runners:
            run()
        with connections[self._alias].cursor() as cursor:
            return results.reply_states(cursor, [self.id])[0]

    # ---- the outcome

    def _read(self, found: results.ReplyState) -> Any:
        """Return the value of the reply, or its error as an exception object."""
        if not found.answered:
            return self._absent()
        if found.value is not None:
            try:
                return json.loads(found.value)
            except (ValueError, RecursionError) as error:
                return UnreadablePayload(f"the reply to message {self.id}: {error}")
        if found.error_class == results.UNANSWERED:
            return Unanswered(self.id, found.error_class, found.error_text)
        if found.error_class:
            return RemoteError(self.id, found.error_class, found.error_text)
        return None

    def _absent(self) -> CannotWait:
        return CannotWait(
            f"no reply to message {self.id} can come: its transaction was rolled back or is not"
            " committed yet, or it was not sent as a request, or its reply is older than"
            " RESULT_RETENTION"
        )

    def _late(self, seconds: float | None) -> ReplyTimeout:
        """Return the timeout error; `seconds` is None in a TestCase, where waiting is pointless."""
        what = f"message {self.id} ({self._type})" if self._type else f"message {self.id}"
        if seconds is None and test_runners:
            text = (
                f"no reply to {what}: its handler failed and will be retried, none takes it, or the"
                f" answering() block is of another database than {self._alias}, where the request"
                f" is: answering(using={self._alias!r})"
            )
        elif seconds is None:
            text = (
                f"no reply to {what}: no worker runs inside a TestCase, so wait for it in a `with"
                " answering():` block of django_mq.testing, or call drain() before result()"
            )
        else:
            why = command_on(self._alias, f"mq_why {self.id}")
            text = (
                f"no reply to {what} within {seconds:g} s; it may still come, and `manage.py {why}`"
                " says what the message is waiting for"
            )
        return ReplyTimeout(text, self.id)


def _restored(id: int, alias: str, type: str, queue: str) -> PendingReply:
    pending = PendingReply(id, using=alias)
    pending._type, pending._queue = type, queue
    return pending


class _Origin:
    """The transaction in which a request was stored."""

    __slots__ = ("__weakref__", "_block", "_connection", "is_within_test")

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = weakref.ref(connection)
        self._block = own_block(connection)
        self.is_within_test = testcase_block(connection) is not None
        if self._block is not None:
            transaction.on_commit(self.ends, using=connection.alias)

    def ends(self) -> None:
        """Do nothing: while this hook is registered, the transaction has not ended."""

    def is_open(self) -> bool:
        """Return whether the transaction is known to be open.

        In a TestCase hooks stay registered for ever, so the atomic block is checked, too.
        """
        connection = self._connection()
        return (
            self._block is not None
            and connection is not None
            and self._block in connection.atomic_blocks
            and any(hook[1] == self.ends for hook in connection.run_on_commit)
        )
