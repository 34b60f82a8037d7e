"""A message that is to be explained, with the lookups that this takes."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cached_property

from django.db.models import QuerySet
from django.db.models.functions import Now

from django_mq.conf import get_settings
from django_mq.models import QueuedMessage
from django_mq.queues.fleet import WorkerProcess, workers
from django_mq.queues.stalled import first_of_line, line_positions
from django_mq.store.waiting_behind import LinePosition

#: For how long a message must have been due before the database is asked whether it can be claimed:
#: for a single answer, and for a page, which is read more often.
LATE, VERY_LATE = timedelta(seconds=10), timedelta(minutes=5)


def read_message(id: int, alias: str) -> QueuedMessage | None:
    """Read a message with its state, and with the database's time as `now`."""
    return _messages(alias).filter(pk=id).first()


class Case:
    """A message, with the lookups that explain it."""

    def __init__(self, message: QueuedMessage, alias: str, late: timedelta = VERY_LATE) -> None:
        self.message = message
        self.late = late
        self.alias = alias
        self.now: datetime = message.now  # type: ignore[attr-defined]  # annotated
        self.ordered = get_settings().queue(message.queue).ordered
        self.first: QueuedMessage | None = None

    @cached_property
    def position(self) -> LinePosition | None:
        """The position of a waiting message in its line; None when it is in no line."""
        waits = self.message.leased_until is None and self.message.dead_at is None
        if not waits or (self.message.key is None and not self.ordered):
            return None
        return line_positions([self.message.pk], using=self.alias).get(self.message.pk)

    def read_first(self, id: int, position: LinePosition) -> QueuedMessage | None:
        """Return message `id`, which this one waits for at `position`.

        If it has ended since, which is the rule in the line of a hot key, return the message that
        this one waits for now, and correct the position; None if it waits for none any more.
        """
        message = self.message
        if first := self.first or read_message(id, self.alias):
            return first
        earlier = _messages(self.alias).filter(pk__lt=message.pk)
        key = None if self.ordered else message.key
        first = first_of_line(earlier, message.queue, message.handler, key)
        if first is not None:
            self.position = position._replace(head=first.pk)
        return first

    def is_late(self) -> bool:
        """Return whether to ask the server about a due message: most are claimed before this."""
        return self._due_for() > self.late

    def is_passed_over(self) -> bool:
        """Return whether a worker with a free thread would have claimed a due message by now."""
        polls = timedelta(seconds=2 * get_settings().poll_interval)
        return self._due_for() > max(self.late, polls)

    def _due_for(self) -> timedelta:
        return self.now - (self.message.leased_until or self.message.processable_after)

    def workers(self) -> list[WorkerProcess]:
        return workers(using=self.alias)


def _messages(alias: str) -> QuerySet[QueuedMessage]:
    messages = QueuedMessage.objects.using(alias).with_state().annotate(now=Now())
    return messages.defer("payload", "metadata")
