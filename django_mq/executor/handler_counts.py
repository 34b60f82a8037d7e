"""Counts and timings of the handlers of this process, reported with every heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django_mq import handlers
from django_mq.executor.ended import Settled
from django_mq.policy.handler_stats import Tally
from django_mq.policy.outcomes import DeadLettered, Retried

if TYPE_CHECKING:
    from django_mq.executor.ended import Ended
    from django_mq.messages import Delivery

#: The number of handlers in a heartbeat: those that ended most messages.
MOST = 100


def queued_for(delivery: Delivery) -> float | None:
    """Return the seconds, by the database's clock, from when a message was due to its claim.

    None for a later attempt than the first: it has waited for the backoff of its policy.
    """
    row = delivery._row
    return max(0.0, row.waited) if row.attempts == 1 else None


class Timings:
    """The tallies of one worker's handlers, each in constant memory. Thread-safe."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def add(self, ended: Sequence[Ended]) -> None:
        """Count deliveries that are settled."""
        together: dict[str, list[Ended]] = {}
        for each in ended:
            name = each.delivery._row.handler
            if name in together:
                together[name].append(each)
            else:
                together[name] = [each]
        for name, those in together.items():
            with self._lock:
                _count(self._tally(name), those)

    def snapshot(self) -> dict[str, Any]:
        """Return the heartbeat's tallies: at most 100 handlers, those with most messages first."""
        with self._lock:
            most = sorted(self._tallies.items(), key=lambda item: -item[1].total)[:MOST]
        told = {}
        for name, tally in most:
            with self._lock:
                told[name] = tally.as_json()
        return told

    def read(self) -> dict[str, Tally]:
        """Return the snapshot as tallies."""
        return {name: Tally.from_json(told) for name, told in self.snapshot().items()}

    def _tally(self, name: str) -> Tally:
        """Return the tally of a handler by any of its names; unknown names share one."""
        tally = self._tallies.get(name)
        if tally is None:
            known = handlers.get(name)
            tally = self._tallies.setdefault(known.name if known else "", Tally())
        return tally


def _count(tally: Tally, ended: list[Ended]) -> None:
    acked = 0
    ran: list[float] = []
    waited: list[float] = []
    for each in ended:
        settled, seconds = each.settled, each.seconds
        if settled is Settled.ACKED or settled is Settled.FINISHED:
            acked += 1
        elif settled in (Settled.HELD, Settled.RELEASED):
            continue  # these are no attempts
        elif settled is Settled.SNOOZED:
            tally.snoozed += 1
        elif isinstance(each.outcome, Retried):
            tally.failed += 1
            tally.retried += 1
        else:
            tally.failed += isinstance(each.outcome, DeadLettered)
            tally.dead += 1
        if seconds:  # else it did not run here
            ran.append(seconds)
            row = each.delivery._row
            if row.attempts == 1:
                waited.append(row.waited)
    tally.acked += acked
    tally.ran.add(ran)
    tally.waited.add(waited)
    claimed_at = ended[-1].delivery._row.claimed_at
    tally.last_at = claimed_at if tally.last_at is None else max(tally.last_at, claimed_at)


#: The timings of each worker that runs in this process, by its id.
_of: dict[str, Timings] = {}


def begin(worker: str) -> Timings:
    """Start counting for `worker`."""
    timings = _of[worker] = Timings()
    return timings


def end(worker: str) -> None:
    """Stop counting for `worker`."""
    _of.pop(worker, None)


def of(worker: str) -> Timings | None:
    """Return the timings of `worker`, if it runs in this process."""
    return _of.get(worker)


def count(ended: Sequence[Ended]) -> None:
    """Count settled deliveries, all claimed by one worker.

    Deliveries that no worker of this process claimed (they expired, or their worker died) count for
    its first worker; there is only one, unless several run in threads.
    """
    if not ended:
        return
    worker = ended[0].delivery._row.claimed_by.partition(":")[0]
    for timings in [_of[worker]] if worker in _of else list(_of.values())[:1]:
        timings.add(ended)
