"""The state of a queue, and its first messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, overload

from django_mq.conf import get_settings
from django_mq.models import QueuedMessage
from django_mq.queues.checking import whole
from django_mq.queues.connecting import alias_of, reading
from django_mq.routing import check_name
from django_mq.store import peek as rows
from django_mq.store import queues as store


@dataclass(frozen=True, slots=True)
class State:
    """The state of one queue.

    `kind` is "processable": a message can be claimed now; "after": none can, look again at `at`
    (else None); "empty": nothing will come by itself. Dead letters do not count, nor does what
    waits behind one. `backoff_until` is None when the queue is not backing off.
    """

    kind: Literal["empty", "processable", "after"]
    at: datetime | None
    paused: bool
    backoff_level: int
    backoff_until: datetime | None


def state(queue: str, *, using: str | None = None) -> State:
    """Return the state of `queue`, by the database's clock, in one statement.

    What is due now counts as processable, and so does a lapsed lease; what is leased, locked by
    anybody else, or behind another message of its key does not. `at` is the earliest due or
    lapse time ahead; when all that is due is taken at this moment and nothing lies ahead, one
    poll interval from now. Whether the queue is paused or backs off changes nothing in `kind`.
    """
    check_name(queue, "queue")
    settings = get_settings()
    with reading(alias_of(using)) as cursor:
        stand = store.state(
            cursor, queue=queue, skip_dead=settings.queue(queue).on_dead_head == "skip"
        )
    kind: Literal["empty", "processable", "after"] = "empty"
    at = None
    if stand.due:
        kind = "processable"
    elif stand.next_at is not None or stand.taken:
        kind = "after"
        at = stand.next_at or stand.now + timedelta(seconds=settings.poll_interval)
    return State(kind, at, stand.paused, stand.backoff_level, stand.backoff_until)


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
    """Return the first messages of `queue` by id; of all queues a dict, by queue.

    `limit` is over all queues together. `skip_locked` leaves out what a worker holds: leased, or
    locked by another transaction. Dead letters are not in line: `dead` shows them, and only
    them. Each message has its `state`; its payload and metadata are read when first
    looked at.
    """
    if queue is not None:
        check_name(queue, "queue")
    whole(limit, "limit")
    alias = alias_of(using)
    messages = QueuedMessage.objects.using(alias).with_state().order_by("pk")
    # What others wrote may be too deep to decode: not here, where nobody asked for it.
    messages = messages.defer("payload", "metadata")
    if dead:
        messages = messages.dead()
        found = list((messages.filter(queue=queue) if queue else messages)[:limit])
    else:
        with reading(alias) as cursor:
            look = rows.peek_free if skip_locked else rows.peek
            ids = look(cursor, queue=queue, limit=limit)
        found = list(messages.filter(pk__in=ids))
    if queue is not None:
        return found
    by_queue: dict[str, list[QueuedMessage]] = {}
    for message in found:
        by_queue.setdefault(message.queue, []).append(message)
    return by_queue
