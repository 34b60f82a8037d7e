"""A reply that may come: its address, whether it can be waited for, and what is read of it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_mq.addressing import check_whole
from django_mq.conf import get_settings
from django_mq.exceptions import (
    CannotWait,
    RemoteError,
    ReplyTimeout,
    Unanswered,
    UnreadablePayload,
)
from django_mq.messages import current_delivery
from django_mq.requests.waits import TIMEOUT, acollect, collect
from django_mq.sending import queue_connection
from django_mq.store import results

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.messages import Receipt

#: What runs messages in a TestCase, whose transaction no worker sees: called before each look.
test_runners: list[Callable[[], object]] = []


class PendingReply:
    """The reply to one request, whether it is there yet or not.

    `id` is the id of the message and the address of its reply: `PendingReply(id)` is the same in
    another process, and so is what was pickled. A reply is kept for RESULT_RETENTION and may be
    read often. Ids can be guessed: check whose it is before you show a reply to somebody. Raises
    InvalidOption for what is no id: in a web view, that is what somebody typed.
    """

    __slots__ = ("_alias", "_birth", "_queue", "_type", "id")

    def __init__(self, id: int, *, using: str | None = None) -> None:
        self.id = check_whole(id, "id", 1, 2**63 - 1)
        self._alias = using or queue_connection(get_settings(), None).alias
        self._type = self._queue = ""
        self._birth: _Birth | None = None

    @classmethod
    def _of(cls, receipt: Receipt, type: str, connection: BaseDatabaseWrapper) -> PendingReply:
        """Return the reply to what was stored just now on `connection`."""
        pending = cls(receipt.ids[0], using=connection.alias)
        pending._type, pending._queue = type, receipt.copies[0].queue
        pending._birth = _Birth(connection)
        return pending

    def result(self, timeout: float | timedelta | None = TIMEOUT) -> Any:
        """Return what the handler returned; wait for it at most `timeout`, None for ever.

        `timeout` is seconds or a timedelta; 0 looks once. Raises

        - RemoteError when the handler failed for good (what is retried is waited for), Unanswered
          when nobody will answer: expired, held too long, cancelled, discarded, purged;
        - ReplyTimeout when the time is over; the reply may still come, and can be asked for again;
        - CannotWait at once where it could not come: the transaction that stores the request is
          open or was rolled back, or the handler that runs here is of the queue that is asked.
        """
        return collect([self], timeout)[0]

    async def aresult(self, timeout: float | timedelta | None = TIMEOUT) -> Any:
        """As `result()`, without blocking the loop, and without a thread for each that waits."""
        return (await acollect([self], timeout))[0]

    def done(self) -> bool:
        """Say whether the reply is there, by one query on the connection of this thread.

        Raises CannotWait when none can come.
        """
        if self._birth is not None and self._birth.is_open():
            return False
        found = self._look_here()
        if found.answered or found.stored:
            return found.answered
        raise self._absent()

    async def adone(self) -> bool:
        """As `done()`."""
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

    # ---- what can be known without waiting

    def _refuse(self) -> None:
        """Raise CannotWait if waiting here could not end well."""
        if self._birth is not None and self._birth.is_open():
            raise CannotWait(
                f"the transaction that stores request {self.id} is open, so nobody can answer it"
                " yet: wait after its atomic() block"
            )
        self._refuse_own_queue()

    def _refuse_own_queue(self) -> None:
        delivery = current_delivery.get()
        if delivery is not None and delivery.queue == self._queue:
            raise CannotWait(
                f"handler {delivery.handler} waits for an answer from its own queue,"
                f" {self._queue}, and could stand in its way: give one of them a queue of its own"
            )

    def _is_within_test(self) -> bool:
        """Say whether it is in the transaction of a TestCase, which this thread alone sees."""
        return _is_within_test(connections[self._alias])

    def _was_born_in_test(self) -> bool:
        """As `_is_within_test()`, in a thread that may not be that of the connection."""
        return self._birth is not None and self._birth.is_within_test

    def _look_here(self) -> results.Found:
        """Look on the connection of this thread."""
        if self._is_within_test():
            for run in test_runners:
                run()
        with connections[self._alias].cursor() as cursor:
            return results.look(cursor, [self.id])[0]

    # ---- what became of it

    def _read(self, found: results.Found) -> Any:
        """Return the value, or the error, that was found."""
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
            " committed yet, or nobody asked for a reply, or that is older than RESULT_RETENTION"
        )

    def _late(self, seconds: float | None) -> ReplyTimeout:
        """Return the error of a time that is over; None: nothing can come while this waits."""
        what = f"message {self.id} ({self._type})" if self._type else f"message {self.id}"
        if seconds is None:
            text = f"no reply to {what}: nobody answers while a TestCase waits, so drain() first"
        else:
            text = (
                f"no reply to {what} within {seconds:g} s; it may still come, and"
                f" `manage.py mq_why {self.id}` says where the message is"
            )
        return ReplyTimeout(text, self.id)


def _restored(id: int, alias: str, type: str, queue: str) -> PendingReply:
    pending = PendingReply(id, using=alias)
    pending._type, pending._queue = type, queue
    return pending


class _Birth:
    """The transaction in which a request was stored."""

    __slots__ = ("__weakref__", "_block", "_connection", "is_within_test")

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        blocks: list[Any] = connection.atomic_blocks
        self._connection = weakref.ref(connection)
        self._block = next((block for block in blocks if not block._from_testcase), None)
        self.is_within_test = _is_within_test(connection)
        if self._block is not None:
            transaction.on_commit(self.ends, using=connection.alias, robust=True)

    def ends(self) -> None:
        """A hook that is still there says that nothing was committed or rolled back since."""

    def is_open(self) -> bool:
        """Say whether the transaction is known to be open.

        The hooks in a TestCase stay for ever, so the block counts as well.
        """
        connection = self._connection()
        return (
            self._block is not None
            and connection is not None
            and self._block in connection.atomic_blocks
            and any(hook[1] == self.ends for hook in connection.run_on_commit)
        )


def _is_within_test(connection: BaseDatabaseWrapper) -> bool:
    blocks: list[Any] = connection.atomic_blocks
    return bool(blocks) and blocks[0]._from_testcase
