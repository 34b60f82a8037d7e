"""Describe what workers run and for how long, and whether they are busy, also with suspects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

from django_mq import handlers
from django_mq.conf import command_on, get_settings
from django_mq.conf.local_time import local_text
from django_mq.messages import worker_of
from django_mq.models import QueuedMessage
from django_mq.policy.durations import precise_span, span
from django_mq.queues.fleet import WorkerProcess
from django_mq.queues.running import RunningMessage, running
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


def holder(message: QueuedMessage, workers: Sequence[WorkerProcess]) -> str:
    """Return the worker that claimed `message`, with host and process if known."""
    id = worker_of(message.claimed_by)
    for worker in workers:
        if worker.id == id:
            seen = "" if worker.alive else f", last seen {local_text(worker.last_seen)}"
            return f"by worker {id} (host {worker.host}, process {worker.pid}{seen})"
    return f"by worker {id} (no heartbeat is stored)"


def own_run(message: QueuedMessage, alias: str) -> tuple[str, str]:
    """Say for how long a running message has run, and when its attempt ends at the latest.

    Both are empty if they are not known.
    """
    found = next(iter(running(ids=[message.pk], using=alias)), None)
    ran_for = found.ran_for if found else None
    known = handlers.get(message.handler)
    limits = []
    if known is not None and known.of_row is None:  # a task's message may have its own timeout
        seconds = handlers.timeout_of(known, get_settings())
        limits.append(f"Its handler's timeout is {precise_span(seconds)}")
    if ran_for is not None and ran_for >= BUSY_AFTER:
        limits.append(f"{command_on(alias, f'mq_stop {message.pk}')} ends the attempt now")
    began = f"for {span(ran_for)}, " if ran_for is not None else ""
    return began, f". {'; '.join(limits)}" if limits else ""


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
