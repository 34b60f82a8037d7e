"""PendingReply: the reply to one request, which may not have arrived yet."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.utils.asyncio import async_unsafe

from django_mq.conf import alias_of
from django_mq.messages import Receipt
from django_mq.outbox.options import check_integer
from django_mq.outbox.send import queue_connection
from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.requests.collecting import TIMEOUT, acollect, collect
from django_mq.requests.reply_query import ReplyQuery, RequestTransaction

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class PendingReply(ReplyQuery):
    """The reply to one request, which may not have arrived yet.

    `id` is the id of the message; `PendingReply(id)` in another process, or a pickled copy, stands
    for the same reply. A reply is kept for RESULT_RETENTION and can be read repeatedly. Ids can be
    guessed: check the owner before you show a reply to a user. Raises InvalidOption for an
    impossible id, such as one that a user typed.
    """

    __slots__ = ()

    def __init__(self, id: int, *, using: str | None = None) -> None:
        alias = queue_connection(None).alias if using is None else alias_of(using)
        super().__init__(check_integer(id, "id", 1, MAX_BIGINT), alias)

    @classmethod
    def _of(cls, receipt: Receipt, type: str, connection: BaseDatabaseWrapper) -> PendingReply:
        """Return the pending reply to the request just stored on `connection`."""
        pending = cls(receipt.ids[0], using=connection.alias)
        pending._type, pending._queue = type, receipt.copies[0].queue
        pending._stored_in = RequestTransaction(connection)
        return pending

    def result(self, timeout: float | timedelta | None = TIMEOUT) -> Any:
        """Return the handler's return value; wait for it at most `timeout` (None: for ever).

        `timeout` is seconds or a timedelta; 0 looks once. Raises

        - RemoteError if the handler failed permanently (the wait continues during retries);
        - Unanswered if no reply will come: the message expired, was held too long, cancelled,
          discarded or purged;
        - ReplyTimeout when the time is up; the reply may still come, and you can wait again;
        - CannotWait at once if no reply could come: the transaction of the request is open or was
          rolled back, or the caller is a handler of the queue that the request goes to.
        """
        return collect([self], timeout)[0]

    async def aresult(self, timeout: float | timedelta | None = TIMEOUT) -> Any:
        """Like `result()`, without blocking the event loop and without a thread per reply."""
        return (await acollect([self], timeout))[0]

    @async_unsafe("done() blocks, and a coroutine calls it: `await adone()`")
    def done(self) -> bool:
        """Return whether the reply has arrived, by one query on this thread's connection.

        Raises CannotWait when no reply can come.
        """
        if self._stored_in is not None and self._stored_in.is_open():
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


def _restored(id: int, alias: str, type: str, queue: str) -> PendingReply:
    pending = PendingReply(id, using=alias)
    pending._type, pending._queue = type, queue
    return pending
