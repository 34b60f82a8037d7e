"""Stalled lines (order keys and ordered queues): their heads, and how many wait behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter

from django.db import connections
from django.db.models import QuerySet

from django_mq.conf import alias_of
from django_mq.models import QueuedMessage
from django_mq.operations.heads import line_positions as read_line_positions
from django_mq.operations.heads import ordered_queues, skipping_queues
from django_mq.policy.names import check_name
from django_mq.queues.arguments import whole_number
from django_mq.queues.transactions import reading
from django_mq.store import waiting_behind
from django_mq.store.waiting_behind import LinePosition

#: Columns that are not read here: a monitoring login lacks the right, and other clients may have
#: written JSON that is nested too deeply to decode.
PRIVATE = ("payload", "metadata", "last_error", "dead_reason")
#: Counts of messages ahead or behind stop here.
MAX_COUNT = 1000
#: `heads()` examines this many blocking messages, the oldest first: about 0.1 s.
MAX_EXAMINED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first message of a line in which other messages wait.

    The line consists of the messages with `key` of `handler` in `queue`, or (key None) of the
    whole ordered queue. `state` is the head's, one of MessageState; `at` is the time of its death
    if it is dead, else its due time. `behind` counts the messages behind it, up to 1,000;
    `capped` says that there may be more.
    """

    queue: str
    handler: str
    key: str | None
    id: int
    type: str
    state: str
    at: datetime
    attempts: int
    max_attempts: int
    behind: int
    capped: bool

    @property
    def shown_behind(self) -> str:
        """The number of messages `behind` as text: `"12"`, or `"1,000+"` when it was capped."""
        return shown_count(self.behind)


def heads(queue: str | None = None, *, limit: int = 100, using: str | None = None) -> list[Head]:
    """Return the heads of the lines of `queue` (None: of all queues) in which messages wait.

    These are the lines in which a worker found blocked messages, and the ordered queues whose
    first message is dead, delayed or retrying; at most `limit`, lowest id first. Requeue or
    discard a dead head to let the others proceed; `cancel()` a delayed or retrying one.

    The cost does not grow with the number of waiting messages: over all queues, only the lines
    of the 10,000 oldest blocking messages are examined.
    """
    if queue is not None:
        check_name(queue, "queue")
    whole_number(limit, "limit")
    alias = alias_of(using)
    with reading(alias) as cursor:
        found = waiting_behind.blocked(
            cursor,
            queue=queue,
            ordered=ordered_queues(),
            skipping=skipping_queues(),
            limit=limit,
            maximum=MAX_COUNT,
            examined=MAX_EXAMINED,
        )
    messages = QueuedMessage.objects.using(alias).with_state().defer(*PRIVATE)
    rows = messages.in_bulk([each.id for each in found])
    heads = []
    for each in found:
        if row := rows.get(each.id):
            heads.append(_head(each, row))
        # It has ended since. Behind a hot key that is the rule, and its line goes on.
        elif each.behind > 1 and (
            row := first_of_line(messages, each.queue, each.handler, each.key)
        ):
            heads.append(_head(each._replace(id=row.pk, behind=each.behind - 1), row))
    return sorted(heads, key=attrgetter("id"))


def first_of_line(
    messages: QuerySet[QueuedMessage], queue: str, handler: str, key: str | None
) -> QueuedMessage | None:
    """Return the first of `messages` in a line now; `key` None: in the whole ordered queue."""
    # The conditions and the order of mq_key, and of the index of ordered queues.
    if key is None:
        line = messages.filter(queue__gte=queue, queue__lte=queue, ordered=True)
        line = line.order_by("queue", "id")
    else:
        line = messages.filter(queue=queue, handler=handler, key__gte=key, key__lte=key)
        line = line.order_by("key", "id")
    if queue in skipping_queues():
        line = line.filter(dead_at=None)
    return line.first()


def line_positions(
    ids: Iterable[int], *, maximum: int = MAX_COUNT, using: str | None = None
) -> dict[int, LinePosition]:
    """Return, by id, the positions of those of `ids` that are in a line.

    Counts stop at `maximum`.
    """
    with connections[alias_of(using)].cursor() as cursor:
        return read_line_positions(cursor, ids, maximum=maximum)


def shown_count(n: int, maximum: int = MAX_COUNT) -> str:
    """Return a count that stopped at `maximum` as text.

    >>> shown_count(12), shown_count(1000)
    ('12', '1,000+')
    """
    return f"{n:,}{'+' if n >= maximum else ''}"


def _head(found: waiting_behind.Blocking, row: QueuedMessage) -> Head:
    return Head(
        queue=found.queue,
        handler=found.handler,
        key=found.key,
        id=found.id,
        type=row.type,
        state=row.state.value,
        at=row.dead_at or row.processable_after,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        behind=found.behind,
        capped=found.behind >= MAX_COUNT,
    )
