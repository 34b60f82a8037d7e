"""What stands between a message and its handler: here, and in the line of its queue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage, QueueState
from django_mq.queues.deciding import effective_limit
from django_mq.queues.fleet import Worker

#: Counting who is ahead stops here.
MOST_AHEAD = 1000


def obstacle(message: QueuedMessage) -> str:
    """Say why no handler of this process takes `message`, or that one would."""
    settings = get_settings()
    if message.handler:
        known = handlers.get(message.handler)
        if known is None:
            return f"no handler named {message.handler} is registered here"
        found: tuple[handlers.Handler, ...] = (known,)
    else:
        found = handlers.table().match(message.type, _metadata(message))
        if not found:
            return f"no handler registered here takes {message.type}"
    allowed = [each for each in found if message.queue in handlers.allowed_queues(each, settings)]
    if not allowed:
        names = ", ".join(each.name for each in found)
        return f"queue {message.queue} is none of those that {names} takes messages from"
    oldest = min(allowed, key=lambda each: each.schema_version)
    if message.schema_version > oldest.schema_version:
        return (
            f"its schema version {message.schema_version} is newer than handler {oldest.name}"
            f" knows ({oldest.schema_version})"
        )
    return f"a worker could not run it, though handler {oldest.name} is registered here"


def in_line(message: QueuedMessage, workers: Sequence[Worker], alias: str) -> str:
    """Say what a due message waits for that is the first of its line, or in none.

    A worker, the backoff or the limit of its queue, the owner of its ordered queue, those ahead.
    """
    serving = [worker for worker in workers if worker.alive and worker.serves(message.queue)]
    if not serving:
        return "but no live worker serves its queue: start mq_worker"
    if all(worker.draining for worker in serving):
        return "but every worker of its queue is draining"
    decided = QueueState.objects.using(alias).annotate(now=Now()).filter(pk=message.queue).first()
    if decided is not None and decided.backoff_level:
        return _backing_off(decided)
    neighbours = QueuedMessage.objects.using(alias).filter(queue=message.queue)
    limit = effective_limit(message.queue, decided.max_in_flight if decided else None)
    if limit is not None:
        leased = neighbours.filter(leased_until__isnull=False).values_list("pk")
        if len(leased[:limit]) == limit:
            return f"but its queue has as many messages in flight as it may: {limit:,}"
    if get_settings().queue(message.queue).ordered and message.leased_until is None:
        return _owned(message, decided, workers)
    n = _count_ahead(message, alias)
    if n == 0:
        return "and is the next to be taken"
    return f"and behind {n:,}{'+' if n == MOST_AHEAD else ''} others of its queue"


def worker_of(message: QueuedMessage) -> str:
    """Return the id of the worker process that claimed `message`."""
    return (message.claimed_by or "").partition(":")[0]


def shown(at: datetime | None) -> str:
    """Return a moment in the current time zone, to the second."""
    if at is None:
        return "an unknown time"
    local = timezone.localtime(at) if timezone.is_aware(at) else at
    return f"{local:%Y-%m-%d %H:%M:%S %Z}".rstrip()


def _backing_off(queue: QueueState) -> str:
    """Say who probes: the wait of the queue is over, else its messages were paused."""
    now: datetime = queue.now  # type: ignore[attr-defined]  # annotated
    text = f"but its queue backs off (level {queue.backoff_level})"
    if queue.probe_by and queue.probe_until and queue.probe_until > now:
        worker = queue.probe_by.partition(":")[0]
        return f"{text}: one message probes, of worker {worker}, and the others wait for its end"
    return f"{text}: the next message that is claimed probes, and the others wait for its end"


def _owned(message: QueuedMessage, decided: QueueState | None, workers: Sequence[Worker]) -> str:
    """Say who takes the first of an ordered queue."""
    now: datetime | None = decided.now if decided else None  # type: ignore[attr-defined]
    owner, until = (decided.owner, decided.owned_until) if decided else (None, None)
    if owner is None or until is None or now is None or until <= now:
        return "but no worker owns its ordered queue just now: one of them takes it in a moment"
    if not message.ordered:
        return (
            f"but is not in line yet: worker {owner}, the owner of its ordered queue, puts it there"
        )
    for worker in workers:
        if worker.id == owner and worker.alive:
            return (
                f"and is the next to be taken by worker {owner} (host {worker.host}, process"
                f" {worker.pid}), which owns its ordered queue"
            )
    return (
        f"but worker {owner} owns its ordered queue until {shown(until)}, and is not heard of:"
        " another one takes it over then"
    )


def _count_ahead(message: QueuedMessage, alias: str) -> int:
    if message.leased_until is not None:  # a lapsed lease goes before what waits
        return 0
    ahead = (
        QueuedMessage.objects.using(alias)
        .filter(
            queue=message.queue,
            leased_until__isnull=True,
            blocked_by__isnull=True,
            dead_at__isnull=True,
            processable_after__lte=Now(),
        )
        .filter(
            Q(priority__gt=message.priority)
            | Q(priority=message.priority, processable_after__lt=message.processable_after)
            | Q(
                priority=message.priority,
                processable_after=message.processable_after,
                pk__lt=message.pk,
            )
        )
        .order_by(F("priority").desc(), "processable_after", "pk")
    )
    return len(ahead.values_list("pk")[:MOST_AHEAD])


def _metadata(message: QueuedMessage) -> dict[str, object]:
    try:
        found = message.metadata
    except (ValueError, RecursionError):  # written by others, and not to be decoded here
        return {}
    return found if isinstance(found, dict) else {}
