"""The state of a queue, and its first messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, overload

from django_mq.conf import alias_of, get_settings
from django_mq.models import QueuedMessage
from django_mq.policy.names import check_name
from django_mq.queues.arguments import whole_number
from django_mq.queues.stalled import PRIVATE
from django_mq.queues.transactions import reading
from django_mq.store import peek as rows
from django_mq.store import queue_state


@dataclass(frozen=True, slots=True)
class State:
    """The state of one queue.

    `kind` is "processable" when a message can be claimed now; "after" when none can before `at`;
    "empty" when no stored message will become due. `at` is None unless `kind` is "after". Dead
    letters and the messages behind them do not count. `backoff_until` is None when the queue is
    not backing off.
    """

    kind: Literal["empty", "processable", "after"]
    at: datetime | None
    paused: bool
    backoff_level: int
    backoff_until: datetime | None


def state(queue: str, *, using: str | None = None) -> State:
    """Return the state of `queue`, by the database's clock.

    A message is processable when it is due or its lease has lapsed, unless it is leased, locked
    by another session, or behind another message of its key or ordered queue. `at` is the next
    time at which a message becomes due or a lease lapses (in an ordered queue, its first message);
    without one, if due messages are locked at this moment, it is one poll interval from now. A
    pause or a backoff of the queue does not change `kind`.

    The cost does not grow with the queue: per priority, the 1,000 messages that have been due
    longest are examined. If none of them can be claimed and more follow, `kind` is "after", and
    `at` is at most one poll interval from now. For a login that may not update messages, which
    cannot see locks, locked messages count as processable.
    """
    check_name(queue, "queue")
    settings = get_settings()
    options = settings.queue(queue)
    with reading(alias_of(using)) as cursor:
        found = queue_state.state(
            cursor,
            queue=queue,
            skip_dead=options.on_dead_head == "skip",
            ordered=options.ordered,
        )
    kind: Literal["empty", "processable", "after"] = "empty"
    at = None
    if found.due:
        kind = "processable"
    elif found.next_at is not None or found.taken or found.more:
        kind = "after"
        at = found.now + timedelta(seconds=settings.poll_interval)
        if found.next_at is not None:
            at = min(at, found.next_at) if found.more else found.next_at
    return State(kind, at, found.paused, found.backoff_level, found.backoff_until)


@overload
def peek(
    queue: None = None,
    *,
    limit: int = 10,
    skip_locked: bool = False,
    dead: bool = False,
    using: str | None = None,
) -> dict[str, list[QueuedMessage]]: ...


@overload
def peek(
    queue: str,
    *,
    limit: int = 10,
    skip_locked: bool = False,
    dead: bool = False,
    using: str | None = None,
) -> list[QueuedMessage]: ...


def peek(
    queue: str | None = None,
    *,
    limit: int = 10,
    skip_locked: bool = False,
    dead: bool = False,
    using: str | None = None,
) -> list[QueuedMessage] | dict[str, list[QueuedMessage]]:
    """Return the first messages of `queue` by id; without `queue`, a dict by queue name.

    `limit` applies to all queues together. `skip_locked` leaves out messages that are leased, or
    locked by another transaction. `dead` returns dead letters, which are left out otherwise. Each
    message has its `state`; payload, metadata and error texts are read on first access.

    The cost does not grow with the queue: if it has more than `limit` messages, they are chosen
    among those first in the order of the claim, those first to lapse and those first blocked; dead
    letters among those that have been dead longest.
    """
    found = peek_messages(queue, limit=limit, skip_locked=skip_locked, dead=dead, using=using)
    if queue is not None:
        return found
    by_queue: dict[str, list[QueuedMessage]] = {}
    for message in found:
        by_queue.setdefault(message.queue, []).append(message)
    return by_queue


def peek_messages(
    queue: str | None,
    *,
    limit: int,
    skip_locked: bool,
    dead: bool,
    using: str | None,
    private: bool = False,
) -> list[QueuedMessage]:
    """Return the messages of `peek()` as one list by id; with `private` also what it defers.

    A worker may end a message while this reads. Messages that are free are locked until they have
    been read; the others are read in the snapshot in which they were found.
    """
    if queue is not None:
        check_name(queue, "queue")
    whole_number(limit, "limit")
    alias = alias_of(using)
    messages = QueuedMessage.objects.using(alias).with_state().order_by("pk")
    if not private:
        messages = messages.defer(*PRIVATE)
    asked = None if queue is None else [queue]
    with reading(alias, one_snapshot=dead or not skip_locked) as cursor:
        if dead:
            ids = rows.peek_dead(cursor, queues=asked, limit=limit)
        else:
            ids = rows.peek(cursor, queues=asked, limit=limit, free=skip_locked)
        return list(messages.filter(pk__in=ids))
