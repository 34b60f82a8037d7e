"""Messages that wait in vain: for a worker, for a handler, or behind a dead letter."""

from __future__ import annotations

from collections.abc import Iterator

from django.db.models.functions import Now

from django_mq import handlers
from django_mq.conf import command_on, get_settings
from django_mq.handlers.nearest import has_subscriber, probable_types
from django_mq.models import Operation, QueuedMessage, Schedule
from django_mq.policy.rounding import counted
from django_mq.policy.routing import TASKS
from django_mq.queues.doctor.findings import Finding, short_cursor
from django_mq.queues.fleet import last_of, workers
from django_mq.queues.message_counts import counts
from django_mq.queues.obstacles import obstacle
from django_mq.queues.stalled import Head, heads, shown_count
from django_mq.queues.topology import held_types, waiting_kinds
from django_mq.states import MessageState
from django_mq.store.readers import prepare_to_read

#: Stalled lines are counted up to this number.
MAX_LINES = 1000
#: The columns of a message that decide which handler takes it.
FOR_OBSTACLE = ("queue", "type", "handler", "schema_version", "metadata")
#: What to do about held messages.
DEPLOY_HANDLER = (
    "deploy the handler and restart every worker of the queue, give a renamed one its former name"
    " in aliases=, or let a handler take what the where= of others leaves"
)
#: A task has neither aliases nor where=.
DEPLOY_TASK = (
    "deploy the task and restart every worker of the queue; if it was renamed, leave a task at its"
    " old path that calls the new one"
)


def workerless(alias: str) -> Iterator[Finding]:
    """D020: no worker is alive, but messages or operations wait, or schedules are enabled."""
    if any(each.alive for each in workers(using=alias)):
        return
    waiting = [each for each in counts(using=alias).values() if each.depth and not each.paused]
    with short_cursor(alias):
        scheduled = Schedule.objects.using(alias).filter(next_at__isnull=False).count()
        late = Schedule.objects.using(alias).filter(next_at__lt=Now()).exists()
        operations = Operation.objects.using(alias).filter(ended_at=None).count()
    work = []
    if waiting:
        depth = counted(
            sum(each.depth for each in waiting),
            sum(each.about("depth") for each in waiting),
            stopped=any(each.is_capped("depth") for each in waiting),
        )
        work.append(_wait(depth))
    if operations:
        work.append(_wait(f"{operations:,}", "operation"))
    if scheduled:
        work.append(f"{scheduled:,} schedule{' is' if scheduled == 1 else 's are'} enabled")
    if work:
        is_due = late or operations or any(each.processable for each in waiting)
        yield Finding(
            id="D020",
            level="error" if is_due else "warning",
            text=f"No worker is alive, {_listed(work)}.",
            hint=f"Start one: manage.py {command_on(alias, 'mq_worker')}. If one should run, its"
            " log says why it ended.",
        )


def _wait(count: str, what: str = "message") -> str:
    return f"1 {what} waits" if count == "1" else f"{count} {what}s wait"


def _listed(parts: list[str]) -> str:
    """Return the last parts of a list in words.

    >>> _listed(["b"]), _listed(["b", "c"])
    ('and b', 'b, and c')
    """
    return ", ".join([*parts[:-1], f"and {parts[-1]}"])


def unserved(alias: str) -> Iterator[Finding]:
    """D013: messages wait in a queue that no worker serves. D015: a handler's queue is unserved."""
    known = workers(using=alias)
    alive = [each for each in known if each.alive]
    if not alive:
        return  # D020 reports it
    serving = [each for each in alive if each.claims]
    resting = [each for each in alive if each.quiet and not each.draining]
    settings = get_settings()
    handled: dict[str, list[tuple[bool, str]]] = {}  # those of another queue come last
    for each in handlers.all_handlers():
        own, *others = handlers.allowed_queues(each, settings)
        handled.setdefault(own, []).append((False, each.name))
        for queue in others:
            handled.setdefault(queue, []).append((True, each.name))
    for queue, found in counts(using=alias).items():
        if any(worker.serves(queue) for worker in serving):
            continue
        if found.depth and not found.paused:
            quiet = any(worker.serves(queue) for worker in resting)
            yield Finding(
                id="D013",
                level="error" if found.processable else "warning",
                text=f"{_wait(found.shown('depth'))} in the queue {queue}, and no live worker"
                f" serves it{' that is not quiet' if quiet else ''}."
                f"{'' if quiet else last_of(queue, known)}",
                hint=f"Resume one: manage.py {command_on(alias, 'mq_workers resume ID')}."
                if quiet
                else _start_one(alias, queue),
            )
        elif serving and queue in handled:
            first = ", ".join(name for _, name in sorted(handled[queue])[:3])
            yield Finding(
                id="D015",
                level="warning",
                text=f"The queue {queue} has handlers ({first}), and no live worker serves it.",
                hint=_start_one(alias, queue),
            )


def _start_one(alias: str, queue: str) -> str:
    return f"Start one: manage.py {command_on(alias, f'mq_worker --queue {queue}')}."


def unheard(alias: str) -> Iterator[Finding]:
    """D014: messages are held because no worker can handle them."""
    held = {queue: found for queue, found in counts(using=alias).items() if found.held}
    if not held:
        return
    with short_cursor(alias) as cursor:
        prepare_to_read(cursor)
        types = held_types(cursor, queues=list(held))
    total = sum(found.held for found in held.values())
    is_capped = any(found.is_capped("held") for found in held.values())
    stopped = is_capped or total > sum(each.messages for each in types.values())
    for type, (messages, first_id) in types.items():
        purge = command_on(alias, f"mq_purge --type {type} --waiting")
        yield _held(
            counted(messages, 0, stopped=stopped),
            f"of type {type}",
            hint=f"{_advice(alias, type, first_id)} To drop all messages of the type that wait,"
            f" held or not, or are dead: manage.py {purge}.",
        )
    if not types:  # the held messages are in the middle of a long backlog
        yield _held(
            counted(total, 0, stopped=is_capped),
            f"in the queue{'' if len(held) == 1 else 's'} {', '.join(sorted(held)[:3])}",
            hint="In the admin, filter the messages by the state held; manage.py"
            f" {command_on(alias, 'mq_why ID')} gives the reason for one.",
        )


def _advice(alias: str, type: str, id: int) -> str:
    """Return what to do about messages of `type`, of which `id` is one, that no handler takes."""
    meant = probable_types(type)
    return (
        (f"Did you mean {' or '.join(meant)}? " if meant else "")
        + f"manage.py {command_on(alias, f'mq_why {id}')} gives the reason:"
        f" {DEPLOY_TASK if type.startswith(TASKS) else DEPLOY_HANDLER}."
    )


def _held(count: str, which: str, *, hint: str) -> Finding:
    return Finding(
        id="D014",
        level="warning",
        text=f"{count} message{'' if count == '1' else 's'} {which}"
        f" {'is' if count == '1' else 'are'} held: no worker has a handler that takes"
        f" {'it' if count == '1' else 'them'}, by name, type, schema version and queue.",
        hint=hint,
    )


def unhandled(alias: str) -> Iterator[Finding]:
    """D034: messages wait, and no handler here takes them: when they are due, they are held.

    Queues from which no handler here takes are left out, except the one for messages without a
    handler: they may be those of other code.
    """
    settings, known = get_settings(), handlers.all_handlers()
    if not known:
        return
    of_handlers = (handlers.allowed_queues(each, settings) for each in known)
    queues = sorted({settings.default_queue}.union(*of_handlers))
    with short_cursor(alias) as cursor:
        prepare_to_read(cursor)
        found, cut = waiting_kinds(cursor, queues=queues)
        rows = QueuedMessage.objects.using(alias).only(*FOR_OBSTACLE)
        samples = rows.in_bulk([each.first_id for each in found])
    for each in found:
        sample = samples.get(each.first_id)  # None if it was claimed since
        by_metadata = not each.handler and has_subscriber(each.type)
        if sample is None or by_metadata or not obstacle(sample):
            continue
        count = counted(each.messages, 0, stopped=each.queue in cut)
        them = "it" if count == "1" else "them"
        named = f" for the handler {each.handler}" if each.handler else ""
        which = f" --handler {each.handler}" if each.handler else ""
        purge = f"mq_purge --queue {each.queue} --type {each.type}{which} --waiting"
        yield Finding(
            id="D034",
            level="warning",
            text=f"{count} message{'' if count == '1' else 's'} of type {each.type}{named}"
            f" wait{'s' if count == '1' else ''} in the queue {each.queue}: no handler here takes"
            f" {them}, so a worker with this code will hold {them}.",
            hint=f"{_advice(alias, each.type, each.first_id)} To drop all messages of the type"
            f"{named} in this queue that wait, also of other versions, or are dead:"
            f" manage.py {command_on(alias, purge)}.",
        )


def stalled(alias: str) -> Iterator[Finding]:
    """D024: messages wait behind a dead letter of their order key or of their ordered queue."""
    found = heads(limit=MAX_LINES, using=alias)
    lines: dict[str, list[Head]] = {}
    for head in found:
        if head.state == MessageState.DEAD and head.behind:
            lines.setdefault(head.queue, []).append(head)
    for queue, stopped in lines.items():
        n, first = shown_count(len(stopped), MAX_LINES), stopped[0].id
        capped = len(found) == MAX_LINES or any(each.capped for each in stopped)
        behind = counted(sum(each.behind for each in stopped), 0, stopped=capped)
        peek = command_on(alias, f"mq_peek {queue} --heads")
        others = "" if n == "1" else f" manage.py {peek} lists them, among other heads."
        yield Finding(
            id="D024",
            level="warning",
            text=f"{_wait(behind)} in the queue {queue} behind"
            f" {'a dead letter' if n == '1' else f'{n} dead letters'} of"
            f" {'its' if behind == '1' else 'their'} key or ordered queue.",
            hint=f"manage.py {command_on(alias, f'mq_why {first}')} explains the first. manage.py"
            f" {command_on(alias, f'mq_requeue --id {first}')} runs it again,"
            f" {command_on(alias, f'mq_purge --id {first}')} drops it; then those behind it proceed"
            f".{others} If later messages make up for a dead one, set the queue's on_dead_head to"
            " 'skip'.",
        )
