"""Describe what workers run and for how long, and whether they are busy, also with suspects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from django.db.models.functions import Now

from django_mq import handlers
from django_mq.conf import command_on, get_settings
from django_mq.conf.local_time import local_text
from django_mq.messages import worker_of
from django_mq.models import QueuedMessage
from django_mq.policy.durations import precise_span, span
from django_mq.queues.fleet import WorkerProcess, workers
from django_mq.queues.running import RunningMessage, running
from django_mq.queues.stalled import MAX_COUNT, shown_count
from django_mq.states import MessageState

#: For how long each message of a busy worker must have run: shorter ones soon make room.
BUSY_AFTER = timedelta(seconds=5)
#: How many running messages are named, the longest-running first.
MAX_NAMED = 3
#: In these states, `suspect` says how the next attempt will run.
_WAITS = (
    *(MessageState.BLOCKED, MessageState.HELD, MessageState.PAUSED),
    *(MessageState.RETRYING, MessageState.DELAYED, MessageState.PROCESSABLE),
)
#: How `last_error` begins after a lease lapsed: the worker that took over the message has stored
#: that the next one is to suspect it, but runs it beside others.
_VANISHED = "WorkerVanished"


def holder(message: QueuedMessage, known: Sequence[WorkerProcess]) -> WorkerProcess | None:
    """Return the worker that claimed `message`; None if it is not one of `known`."""
    id = worker_of(message.claimed_by)
    return next((worker for worker in known if worker.id == id), None)


def holder_name(message: QueuedMessage, worker: WorkerProcess | None) -> str:
    """Return the id of the worker that claimed `message`, with host and process if known."""
    if worker is None:
        return f"worker {worker_of(message.claimed_by)}"
    return f"worker {worker.id} (host {worker.host}, process {worker.pid})"


def held_by_gone(queue: str, alias: str) -> str:
    """Say how many messages in flight of `queue` workers that are gone hold; empty if none.

    The workers are read last, so that none of them is missing because it has just started.
    """
    messages = QueuedMessage.objects.using(alias).filter(queue=queue, leased_until__gt=Now())
    leases = list(messages.values_list("claimed_by", "leased_until")[:MAX_COUNT])
    alive = {worker.id for worker in workers(using=alias) if worker.alive}
    ends = [until for claimer, until in leases if until and worker_of(claimer) not in alive]
    if not ends:
        return ""
    until = local_text(max(ends))
    if len(ends) == 1:
        return f"1 of them is held by a worker that is gone, until {until}"
    n = shown_count(len(ends))
    return f"{n} of them are held by workers that are gone, the last until {until}"


def ran_for(message: QueuedMessage, alias: str) -> timedelta | None:
    """Return for how long a running message has run; None if its worker did not report it."""
    found = next(iter(running(ids=[message.pk], using=alias)), None)
    return found.ran_for if found else None


def ends(message: QueuedMessage, ran: timedelta | None, now: datetime, alias: str) -> str:
    """Say when an attempt that has run for `ran` ends at the latest; empty if that is unknown.

    A handler that `extend()`s its timeout also extends its lease, unless it is a coroutine.
    """
    settings, known = get_settings(), handlers.get(message.handler)
    full = timedelta(seconds=settings.queue(message.queue).lease)
    said = []
    if message.leased_until is not None and message.leased_until > now + full:
        until = local_text(message.leased_until)
        said.append(f"It has extended its timeout: it may run until {until}")
    elif known is not None and known.of_row is None:  # a task's message may have its own timeout
        seconds = handlers.timeout_of(known, settings)
        if ran is None or ran <= timedelta(seconds=seconds):
            said.append(f"Its handler's timeout is {precise_span(seconds)}")
    if ran is not None and ran >= BUSY_AFTER:
        said.append(f"{command_on(alias, f'mq_stop {message.pk}')} ends the attempt now")
    return f". {'; '.join(said)}" if said else ""


def busy(serving: Sequence[WorkerProcess], alias: str) -> str:
    """Name what runs on the workers `serving` if all of them are busy; empty if one is not.

    A heartbeat does not tell how many threads are free now. So ask this about a message that any
    free thread would have claimed by now: then a worker is busy if all that it runs has run for
    BUSY_AFTER, or if it has claimed a suspect.
    """
    suspects = _claimed_suspects(alias) if serving else {}
    others = [worker for worker in serving if worker.id not in suspects]
    found: dict[str, list[RunningMessage]] = {worker.id: [] for worker in others}
    ids = {id for worker in others for id in worker.running if id > 0}
    longest = running(ids=ids, using=alias)
    for each in longest:
        if each.worker in found:
            found[each.worker].append(each)
    if not serving or not all(_is_busy(each, found[each.id]) for each in others):
        return ""
    named = [
        _has_suspects(each.id, suspects[each.id]) for each in serving if each.id in suspects
    ] + [
        f"worker {each.worker[:8]} has run message {each.id}{_handler(each)}"
        f" for {span(each.ran_for or timedelta())}"
        for each in longest
    ]
    if (more := len(named) - MAX_NAMED) > 0:
        del named[MAX_NAMED:]
        named.append(f"and {more:,} more message{' runs' if more == 1 else 's run'}")
    return f"; the workers that serve its queue are busy: {', '.join(named)}"


def suspicion(message: QueuedMessage) -> str:
    """Say why a message that was read with its state waits to run alone; empty if it does not."""
    state = message.state
    leased = state is MessageState.LEASED and not message.last_error.startswith(_VANISHED)
    if not (message.suspect and (leased or state in _WAITS)):
        return ""
    return (
        "It is a suspect (its process died while it ran, or its lease lapsed), so it waits until"
        " nothing else runs in the process that claims it, and runs there alone"
    )


def _claimed_suspects(alias: str) -> Mapping[str, Sequence[QueuedMessage]]:
    """Return the suspects that each worker has claimed: nothing else starts beside them there.

    Suspects whose lease has just lapsed are left out: their rows do not tell whether they run
    alone.
    """
    leased = QueuedMessage.objects.using(alias).filter(leased_until__isnull=False, suspect=True)
    found = leased.exclude(last_error__startswith=_VANISHED).order_by("leased_until", "pk")
    by_worker: dict[str, list[QueuedMessage]] = defaultdict(list)
    for each in found.only("handler", "claimed_by", "leased_until"):
        by_worker[worker_of(each.claimed_by)].append(each)
    return by_worker


def _has_suspects(worker: str, suspects: Sequence[QueuedMessage]) -> str:
    first = f"message {suspects[0].pk}{_handler(suspects[0])}"
    if len(suspects) == 1:
        return f"worker {worker[:8]} has a suspect, beside which nothing starts: {first}"
    return (
        f"worker {worker[:8]} has {len(suspects):,} suspects, which run one after another, beside"
        f" nothing else: first {first}"
    )


def _is_busy(worker: WorkerProcess, found: Sequence[RunningMessage]) -> bool:
    """Return whether all that `worker` ran at its last heartbeat still runs, and for long."""
    if (
        not found
        or "running" in worker.unreadable
        or {each.id for each in found} != set(worker.running)
    ):
        return False
    return all(each.ran_for is not None and each.ran_for >= BUSY_AFTER for each in found)


def _handler(message: RunningMessage | QueuedMessage) -> str:
    return f" ({message.handler})" if message.handler else ""
