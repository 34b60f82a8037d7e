"""ReplyQuery: queries the reply to one request, unless waiting for it cannot succeed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from django_mq.conf import command_on
from django_mq.exceptions import (
    CannotWait,
    RemoteError,
    ReplyTimeout,
    Unanswered,
    UnreadablePayload,
)
from django_mq.messages import current_delivery, foreign_alias
from django_mq.outbox.blocks import own_block, testcase_block
from django_mq.store import results

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


#: Functions that run messages, called before each query: one per open block of `answering()`.
test_runners: list[Callable[[], object]] = []


class ReplyQuery:
    """Queries the reply to request `id`, and turns it into a value or an error."""

    __slots__ = ("_alias", "_queue", "_stored_in", "_type", "id")

    def __init__(self, id: int, alias: str) -> None:
        self.id = id
        self._alias = alias
        self._type = self._queue = ""
        self._stored_in: RequestTransaction | None = None

    # ---- checks that need no waiting

    def _refuse(self) -> None:
        """Raise CannotWait if waiting here could not succeed."""
        if self._stored_in is not None and self._stored_in.is_open():
            delivery = current_delivery.get()
            if delivery is not None and delivery._is_atomic:
                who = "a handler that waits needs @handler(atomic=False)"
            else:
                who = (
                    "with ATOMIC_REQUESTS, a view that waits needs @transaction.non_atomic_requests"
                )
            raise CannotWait(
                f"the transaction of request {self.id} is still open, so no worker can see it:"
                f" wait after its atomic() block; {who}"
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

    def _was_stored_in_test(self) -> bool:
        """Like `_is_answered_here()`, from any thread."""
        within_test = self._stored_in is not None and self._stored_in.is_within_test
        return bool(test_runners) or within_test

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


class RequestTransaction:
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
