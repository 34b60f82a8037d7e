"""Queues whose messages wait although workers serve them: these are busy, or claim nothing.

Or the queue is at its limit, and workers that are gone hold some of its messages in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import sleep

from django_mq.conf import command_on, get_settings
from django_mq.policy.durations import span
from django_mq.queues.busy import held_by_gone
from django_mq.queues.doctor.findings import Finding
from django_mq.queues.fleet import WorkerProcess, workers
from django_mq.queues.message_counts import QueueCounts, counts

#: For how long a message must have been due: shorter peaks pass.
DUE_FOR = timedelta(minutes=5)
#: The share of its threads or slots from which a worker is busy: between two messages, each is free
#: for a moment.
BUSY = 0.9
#: Long enough for a worker to claim what has just become claimable.
SECONDS_BETWEEN_LOOKS = 1.0


def saturated(alias: str) -> Iterator[Finding]:
    """D028: a message has been due for long, and all workers of its queue are busy."""
    claiming = [each for each in workers(using=alias) if each.claims]
    for queue, found in counts(using=alias).items():
        serving = [each for each in claiming if each.serves(queue)]
        if not serving or not all((each.busy or 0.0) >= BUSY for each in serving):
            continue
        if (due_for := _waits_for_room(found)) is None:
            continue
        yield Finding(
            id="D028",
            level="warning",
            text=f"A message in the queue {queue} has been due for {span(due_for)}, and"
            f" {_all_busy(serving)}.",
            hint=f"Start more of them, or give each more {_scarce(serving)}: manage.py"
            f" {command_on(alias, 'mq_workers')} shows what they run. If one handler takes their"
            " time, give it a queue and workers of its own.",
        )


def unclaimed(alias: str) -> Iterator[Finding]:
    """D032: a message has been due for long, and workers with room for it claim nothing.

    It looks twice: a message whose queue was just resumed, or whose key just became free, has been
    due for as long, and is claimed in a moment.
    """
    if not (before := _unclaimed(alias)):
        return
    sleep(SECONDS_BETWEEN_LOOKS)
    for queue, (serving, due_for) in _unclaimed(alias).items():
        if queue not in before:
            continue
        yield Finding(
            id="D032",
            level="warning",
            text=f"A message in the queue {queue} has been due for {span(due_for)}, and none of the"
            f" queue is in flight, although {serving.shown_name} serves it and is"
            f" {serving.shown_busy} busy.",
            hint="The worker's log says why it claims nothing: look for the events"
            " statement_refused, claim_refused, loop_failed and loop_blocked. Run mq_doctor with"
            f" the worker's login. manage.py {command_on(alias, 'mq_why ID')} says whether a"
            " session has the message locked or the database refuses the claim"
            f" ({command_on(alias, f'mq_peek {queue}')} lists the ids).",
        )


def held_by_lost(alias: str) -> Iterator[Finding]:
    """D035: messages wait in a queue at its limit, and workers that are gone take up part of it."""
    for queue, found in counts(using=alias).items():
        if not (found.processable and _is_full(found)):
            continue
        if held := held_by_gone(queue, alias):
            yield Finding(
                id="D035",
                level="warning",
                text=f"Messages wait because the queue {queue} has reached its limit of messages in"
                f" flight, {found.max_in_flight:,}. {held}.",
                hint="Other workers take these messages over when their leases lapse, and no"
                " command can shorten a lease. Until then, a higher limit lets others start:"
                f" manage.py {command_on(alias, f'mq_limit {queue} N')}. If such leases are long,"
                " let handlers call extend() more often, with fewer seconds.",
            )


def _unclaimed(alias: str) -> dict[str, tuple[WorkerProcess, timedelta]]:
    """Return a worker with room for each queue of which nothing is claimed, and for how long."""
    longest_sleep = timedelta(seconds=2 * get_settings().poll_interval)
    idle = [each for each in workers(using=alias) if each.has_room]
    unclaimed = {}
    for queue, found in counts(using=alias).items():
        serving = next((each for each in idle if each.serves(queue)), None)
        due_for = _waits_for_room(found)
        if serving is None or due_for is None or found.in_flight or found.ordered:
            continue
        if due_for > longest_sleep:
            unclaimed[queue] = serving, due_for
    return unclaimed


def _waits_for_room(found: QueueCounts) -> timedelta | None:
    """Return for how long a message has been due, if more room on the workers would start it."""
    # One runs after the other, however many threads there are.
    in_turn = found.ordered and found.in_flight > 0
    if found.paused or found.backoff_level or _is_full(found) or in_turn:
        return None
    return found.oldest if found.oldest is not None and found.oldest >= DUE_FOR else None


def _is_full(found: QueueCounts) -> bool:
    return found.max_in_flight is not None and found.in_flight >= found.max_in_flight


def _scarce(serving: Sequence[WorkerProcess]) -> str:
    full = any((each.threads_used or 0.0) >= BUSY * (each.threads or 1) for each in serving)
    return "threads" if full else "slots (ASYNC_SLOTS)"


def _all_busy(serving: Sequence[WorkerProcess]) -> str:
    if len(serving) == 1:
        return f"the worker that serves it is {serving[0].shown_busy} busy"
    least = min(serving, key=lambda each: each.busy or 0.0)
    return f"all {len(serving):,} workers that serve it are at least {least.shown_busy} busy"
