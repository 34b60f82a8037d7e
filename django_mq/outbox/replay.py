"""Broadcast handled messages again: copies for their own handlers, or for another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_mq import handlers
from django_mq.exceptions import NothingKept, RoutingError
from django_mq.outbox.write import CallQueues, RowWriter
from django_mq.store.rows import NewRow, Rows

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.conf import Settings
    from django_mq.handlers import Handler
    from django_mq.store.replay import PastMessage


class Replays:
    """Writes copies of handled messages; `to` names a handler that gets them all.

    A copy keeps its queue if its handler allows that queue, and otherwise goes to the handler's own
    queue. Raises RoutingError if no such handler is known here.
    """

    def __init__(self, settings: Settings, *, to: str | None) -> None:
        self.settings = settings
        self._queues = CallQueues(settings)
        self._to = None if to is None else _chosen(to)

    def write(self, connection: BaseDatabaseWrapper, past: Sequence[PastMessage]) -> None:
        """Store a copy of each message, all or none."""
        rows = Rows(self._row(each) for each in past)
        RowWriter(connection, self._queues).insert(rows)

    def check(self, past: Sequence[PastMessage]) -> None:
        """Raise RoutingError unless each message has a handler here; reads no payload."""
        for each in past:
            self._handler(each)

    def _row(self, past: PastMessage) -> NewRow:
        if past.payload is None:
            raise NothingKept(
                f"message {past.id} was handled without keeping its payload, so it cannot be"
                " replayed; no message was replayed: set history_payload for its queue or handler,"
                " which keeps the payloads of messages that are handled from then on"
            )
        handler = self._handler(past)
        queue = past.queue
        if queue not in handlers.allowed_queues(handler, self.settings):
            queue = handlers.queue_of(handler, self.settings)
        options = self._queues.add(queue)
        return NewRow(
            queue=queue,
            type=past.type,
            payload=past.payload,
            max_attempts=handlers.retry_of(handler, queue, self.settings).max_attempts,
            handler=handler.name,
            schema_version=past.schema_version,
            metadata=past.metadata or "{}",
            priority=past.priority,
            key=past.key,
            wants_result=not handler.patterns,  # a task, and each task has a result
            ordered=options.ordered,
        )

    def _handler(self, past: PastMessage) -> Handler:
        handler = self._to or handlers.get(past.handler)
        if handler is None:
            raise RoutingError(
                f"message {past.id} was handled by {past.handler or 'no named handler'}, which is"
                " not registered here: say to which handler to replay it (`to`)"
            )
        return handler


def _chosen(name: str) -> Handler:
    found = handlers.get(name)
    if found is None:
        raise RoutingError(f"cannot replay to {name}: no handler here has that name")
    if not found.patterns:
        raise RoutingError(f"cannot replay to {name}: it is a task, so call its enqueue()")
    return found
