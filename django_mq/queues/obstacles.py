"""Why no handler takes a held message, or no worker a due one, and the traces of removed ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter

from django.db import DatabaseError, OperationalError, ProgrammingError
from django.db.models.functions import Now

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.conf.local_time import local_text
from django_mq.handlers.holding import other_queue, unknown_handler, unknown_type
from django_mq.handlers.nearest import nearest_handlers, nearest_types
from django_mq.messages import worker_of
from django_mq.models import FailedAttempt, HandledMessage, QueuedMessage, QueueState, Result
from django_mq.policy.error_text import Failure, describe
from django_mq.policy.routing import TASKS
from django_mq.queues.busy import busy, held_by_gone
from django_mq.queues.decisions import effective_limit
from django_mq.queues.fleet import WorkerProcess, last_of
from django_mq.queues.stalled import MAX_COUNT, shown_count
from django_mq.queues.transactions import reading, writing
from django_mq.store.obstacles import ahead, holder
from django_mq.store.refused_rows import try_claim
from django_mq.store.results import UNANSWERED

#: Advice for messages that name a handler under its former name.
RENAMED = "; if it was renamed, give it aliases=({!r},)"
#: The same for tasks, which have no aliases.
RENAMED_TASK = "; if it was renamed, leave a task at its old path that calls the new one"
#: Advice for messages in a queue that their handler does not allow.
ALLOW = "; unless the queue is misspelt, allow it with @handler(..., queues=({!r},))"

#: Added if nothing is left of a message.
NO_TRACE = (
    " Acked messages are kept only where the option history is on. If the project logs INFO of"
    " django_mq, the log record of a removal by an operator has its first 1,000 ids."
)


def obstacle(message: QueuedMessage) -> str:
    """Say why no handler registered in this process takes `message`; empty if one would take it."""
    return obstacle_for(message)[0]


def obstacle_for(message: QueuedMessage) -> tuple[str, str]:
    """Return the obstacle, and how the reason of a worker with the same obstacle begins."""
    settings = get_settings()
    if message.handler:
        known = handlers.get(message.handler)
        if known is None:
            near = nearest_handlers(message.handler, message.type)
            is_task = message.type.startswith(TASKS)
            renamed = RENAMED_TASK if is_task else RENAMED.format(message.handler)
            text = f"no handler named {message.handler} is registered here{near}{renamed}"
            return text, unknown_handler(message.handler)
        found: tuple[handlers.Handler, ...] = (known,)
    else:
        found = handlers.table().match(message.type, _metadata(message))
        if not found:
            near = nearest_types(message.type)
            text = f"no handler registered here takes {message.type}{near}"
            return text, unknown_type(message.type, message.queue)
    allowed = [each for each in found if message.queue in handlers.allowed_queues(each, settings)]
    if not allowed:
        names = ", ".join(each.name for each in found)
        allow = "" if message.type.startswith(TASKS) else ALLOW.format(message.queue)
        text = f"no matching handler ({names}) takes messages from queue {message.queue}{allow}"
        if message.handler:
            return text, other_queue(found[0].name, message.queue)
        return text, unknown_type(message.type, message.queue)
    for each in allowed:
        if refused := handlers.refusal(each, message.type, message.schema_version):
            return refused, refused
    first = allowed[0]
    if (
        message.handler
        and not handlers.is_subscribed(first, message.type)
        and handlers.REPLAY not in _metadata(message)
    ):
        text = handlers.unsubscribed(first, message.type)
        return text, text
    return "", ""


def other_code(message: QueuedMessage, workers: Sequence[WorkerProcess]) -> str:
    """Say which workers to restart if a worker held `message` that this process could run."""
    name = f"handler {message.handler}" if message.handler else "a handler for it"
    text = f"a worker could not run it, although {name} is registered here"
    serving = [worker for worker in workers if worker.alive and worker.serves(message.queue)]
    if not serving:
        return f"{text}: no live worker serves its queue, so start mq_worker"
    oldest = min(serving, key=attrgetter("started_at"))
    return (
        f"{text}: restart the workers of its queue that run older code. The one that has run"
        f" longest is {oldest.shown_name}, started at {local_text(oldest.started_at)}"
    )


def in_line(
    message: QueuedMessage, workers: Sequence[WorkerProcess], alias: str, *, passed_over: bool
) -> str:
    """Say what a due message waits for if nothing of its key or ordered queue is ahead of it.

    The possible reasons, in order: no worker, a backoff, the in-flight limit, the owner of its
    ordered queue, other messages of its queue. If the message was `passed_over`, that is, if any
    free thread would have claimed it by now, it adds that all workers are busy, if they are.
    """
    serving = [worker for worker in workers if worker.alive and worker.serves(message.queue)]
    if not serving:
        last = last_of(message.queue, workers).removesuffix(".")
        return f"but no live worker serves its queue: start mq_worker{last and '.'}{last}"
    if not any(worker.claims for worker in serving):
        if all(worker.draining for worker in serving):
            return "but every worker of its queue is draining: start mq_worker"
        return (
            "but every worker of its queue is quiet or draining: resume one with mq_workers resume,"
            " or start mq_worker"
        )
    queue = QueueState.objects.using(alias).annotate(now=Now()).filter(pk=message.queue).first()
    if queue is not None and queue.backoff_level:
        return _backing_off(queue)
    limit = effective_limit(message.queue, queue.max_in_flight if queue else None)
    if limit is not None and (full := _full(message.queue, limit, alias)):
        return full
    runs = busy([worker for worker in serving if worker.claims], alias) if passed_over else ""
    if get_settings().queue(message.queue).ordered and message.leased_until is None:
        return _owned(message, queue, workers) + runs
    n = _count_ahead(message, alias)
    if n == 0:
        neglected = _neglected(serving) if passed_over and not runs else ""
        return f"and is next to be claimed{runs}{neglected}"
    others = f"{shown_count(n)} other message{'' if n == 1 else 's'} of its queue"
    return f"and is behind {others}{runs}"


def _full(queue: str, limit: int, alias: str) -> str:
    """Say that as many messages of `queue` are in flight as `limit` allows; empty if fewer are."""
    messages = QueuedMessage.objects.using(alias).filter(queue=queue)
    leased = messages.filter(leased_until__isnull=False).values_list("pk")
    if len(leased[:limit]) < limit:
        return ""
    text = f"but its queue has reached its limit of messages in flight: {limit:,}"
    return f"{text}. {held}" if (held := held_by_gone(queue, alias)) else text


def _neglected(serving: Sequence[WorkerProcess]) -> str:
    """Name a worker that has room, but does not claim the next message of its queue."""
    for worker in serving:
        if worker.has_room:
            return (
                f"; {worker.shown_name} has room for it: if it does not claim it in a moment, its"
                " log says why"
            )
    return ""


def locked(message: QueuedMessage, alias: str) -> str:
    """Say which session has the row of a due message locked; empty if none has.

    Also empty for a login that may read only some columns, and thus no system columns.
    """
    try:
        with reading(alias) as cursor:
            found = holder(cursor, message.pk)
    except ProgrammingError:
        return ""
    if found is None:
        return ""
    name = f" ({found.application})" if found.application else ""
    return (
        f"session {found.pid} of the server{name} has its row locked, so no worker claims it until"
        " the transaction of that session ends"
    )


def claim_refusal(id: int, alias: str) -> Failure | None:
    """Return the error with which a trigger, a policy or a constraint refuses the claim of `id`.

    None if the claim would succeed, or if this login may not change messages. The claim is undone.
    """
    error = _claim_error([id], alias)
    if error is None or isinstance(error, OperationalError) or _claim_error([], alias) is not None:
        return None
    return describe(error.__cause__ or error)


def _claim_error(ids: list[int], alias: str) -> DatabaseError | None:
    try:
        with writing(alias, dry_run=True) as cursor:
            try_claim(cursor, ids, records=False)
    except DatabaseError as error:
        return error
    return None


def _backing_off(queue: QueueState) -> str:
    """Say which worker probes. Until the wait is over, messages of the queue count as paused."""
    now: datetime = queue.now  # type: ignore[attr-defined]  # annotated
    text = f"but its queue is backing off (level {queue.backoff_level})"
    if queue.probe_by and queue.probe_until and queue.probe_until > now:
        worker = worker_of(queue.probe_by)
        return f"{text}: worker {worker} runs one message as a probe, and the others wait for it"
    return f"{text}: the next message claimed is the probe, and the others wait for it"


def _owned(
    message: QueuedMessage, queue: QueueState | None, workers: Sequence[WorkerProcess]
) -> str:
    """Say which worker claims the first message of an ordered queue."""
    now: datetime | None = queue.now if queue else None  # type: ignore[attr-defined]
    owner, until = (queue.owner, queue.owned_until) if queue else (None, None)
    if owner is None or until is None or now is None or until <= now:
        return "but no worker owns its ordered queue right now: one takes ownership in a moment"
    if not message.ordered:
        return f"but is not in line yet: worker {owner}, which owns its ordered queue, adds it"
    for worker in workers:
        if worker.id == owner and worker.alive:
            return (
                f"and is next to be claimed by worker {owner} (host {worker.host}, process"
                f" {worker.pid}), which owns its ordered queue"
            )
    return (
        f"but worker {owner} owns its ordered queue until {local_text(until)} and sends no"
        " heartbeats: another worker takes ownership then"
    )


def _count_ahead(message: QueuedMessage, alias: str) -> int:
    if message.leased_until is not None:  # lapsed leases are claimed before waiting messages
        return 0
    with reading(alias) as cursor:
        return ahead(cursor, id=message.pk, queue=message.queue, maximum=MAX_COUNT)


def _metadata(message: QueuedMessage) -> dict[str, object]:
    found = message.metadata  # another client may have written something else
    return found if isinstance(found, dict) else {}


def last_known(id: int, alias: str) -> tuple[str, str]:
    """Return what is known about message `id`, and separately its perhaps private error text."""
    columns = "handler", "error_class", "error_text", "created_at"
    reply = Result.objects.using(alias).only(*columns).filter(pk=id).first()
    gone = f"Message {id} is not stored: it was acked, cancelled or purged, or was never committed."
    text = _acked(id, alias)
    if not text and reply is not None and not reply.error_class:  # stored together with the ack
        text = f"Message {id} was acked."
    elif not text:
        text = gone
    if reply is not None:
        text += f" Its reply was stored at {local_text(reply.created_at)}: {_outcome(reply)}."
    last = (
        FailedAttempt.objects.using(alias).filter(message_id=id).order_by("-attempt", "-pk").first()
    )
    if last is None:
        return text + (NO_TRACE if text == gone else ""), reply.error_text if reply else ""
    handler = f" in handler {last.handler}" if last.handler else ""
    return (
        f"{text} Its last failed attempt, number {last.attempt} ({last.type}, queue {last.queue}),"
        f" ended{handler} at {local_text(last.ended_at)}.",
        f"{last.error_class}: {last.error_text}".strip(": "),
    )


def _acked(id: int, alias: str) -> str:
    """Say how message `id` of the history ended, empty if it is not there."""
    columns = "queue", "type", "handler", "worker", "attempts", "ended_at"
    past = HandledMessage.objects.using(alias).only(*columns).filter(pk=id)
    message = past.order_by("-ended_at").first()  # two messages may share an id after a reset
    if message is None:
        return ""
    by = f", by handler {message.handler}" if message.handler else ""
    on = f" on worker {message.worker}" if message.worker else ""
    return (
        f"Message {id} ({message.type}, queue {message.queue}) was acked at"
        f" {local_text(message.ended_at)}, after attempt {message.attempts}{by}{on}."
        " It is in the history."
    )


def _outcome(reply: Result) -> str:
    handler = f"handler {reply.handler}" if reply.handler else "its handler"
    if not reply.error_class:
        return f"{handler} returned a value"
    if reply.error_class == UNANSWERED:
        return "no reply will come"
    return f"{handler} failed with {reply.error_class}"
