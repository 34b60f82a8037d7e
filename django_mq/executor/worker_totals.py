"""The totals of the handlers of this process, reported with every heartbeat."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from django_mq import handlers
from django_mq.executor.ended import ACKED, Ended, Settled
from django_mq.executor.minutes import FigureSource, Minutes
from django_mq.messages import ClaimedRow, Delivery, worker_of
from django_mq.policy.handler_totals import HandlerTotals
from django_mq.policy.outcomes import DeadLettered, Retried

#: The maximum number of handlers in a heartbeat: those that ended the most messages.
MAX_HANDLERS = 100
#: Pairs of queue and handler that are counted separately. Beyond these, the queues of a handler are
#: counted together.
MAX_SOURCES = 500


def queued_for(delivery: Delivery) -> float | None:
    """Return the seconds between a message's due time and its claim, by the database's clock.

    None for later attempts, which have waited for the backoff of their policy.
    """
    row = delivery._row
    return max(0.0, row.waited) if row.attempts == 1 else None


class WorkerTotals:
    """The totals of one worker by queue and handler, each in constant memory. Thread-safe."""

    def __init__(self) -> None:
        self.minutes = Minutes()
        self._sources: set[FigureSource] = set()

    def add(self, ended: Sequence[Ended]) -> None:
        """Count deliveries that are settled."""
        # Do not keep the tuples: long-lived ones would trigger the garbage collector.
        names = {_names(each.delivery._row) for each in ended}
        together: dict[tuple[str, str], Sequence[Ended]] = dict.fromkeys(names, ended)
        if len(names) > 1:
            apart: dict[tuple[str, str], list[Ended]] = {name: [] for name in names}
            for each in ended:
                apart[_names(each.delivery._row)].append(each)
            together = dict(apart)
        for (queue, handler), those in together.items():
            with self.minutes.lock:
                source = self._source(queue, handler)
                created = _count(self.minutes.current(source), those)
                if created:
                    self.minutes.arrived(source, created)

    def snapshot(self) -> dict[str, Any]:
        """Return the totals for the heartbeat: at most 100 handlers, most messages first."""
        return {name: total.as_json() for name, total in self.read().items()}

    def read(self) -> dict[str, HandlerTotals]:
        """Return copies of the totals of these handlers, over all queues."""
        found: dict[str, HandlerTotals] = {}
        for source, total in self.by_source().items():
            found.setdefault(source.handler, HandlerTotals()).merge(total)
        return dict(sorted(found.items(), key=lambda item: -item[1].total)[:MAX_HANDLERS])

    def by_source(self) -> dict[FigureSource, HandlerTotals]:
        """Return a copy of the totals of each pair of queue and handler, since the worker started.

        Beyond 500 pairs, the name of the queue is empty.
        """
        with self.minutes.lock:
            sources = list(self._sources)
        return {source: self.minutes.total(source) for source in sources}

    def _source(self, queue: str, handler: str) -> FigureSource:
        """Return the source for a name or alias of a handler; unknown names share the name ''."""
        source = FigureSource(queue, handler)
        if source not in self._sources:
            known = handlers.get(handler)
            source = FigureSource(queue, known.name if known else "")
            if source not in self._sources and len(self._sources) >= MAX_SOURCES:
                source = FigureSource("", source.handler)
            self._sources.add(source)
        return source


#: Reads two names at the speed of C, since this is done for every message.
_names = itemgetter(*map(ClaimedRow._fields.index, ("queue", "handler")))


def _count(totals: HandlerTotals, ended: Sequence[Ended]) -> list[float]:
    """Count deliveries; return the creation times of those that ended their first attempt."""
    others = [each for each in ended if each.settled is not ACKED]
    totals.acked += len(ended) - len(others)
    last_at = ended[-1].delivery._row.claimed_at
    if others:
        ended = [each for each in ended if each.settled is ACKED or _count_other(totals, each)]
    ran = [each for each in ended if each.seconds]  # the others did not run here
    first = [row for each in ran if (row := each.delivery._row).attempts == 1]
    totals.ran.add([each.seconds for each in ran])
    totals.waited.add([row.waited for row in first])
    totals.last_at = last_at if totals.last_at is None else max(totals.last_at, last_at)
    if others:
        first = [each.delivery._row for each in ended if _is_new(each)]
    return [row.created for row in first]


def _count_other(totals: HandlerTotals, each: Ended) -> bool:
    """Count a delivery that is not simply acked; return whether it was an attempt, or died."""
    settled = each.settled
    if settled in (Settled.HELD, Settled.RELEASED):
        return False
    if settled is Settled.FINISHED:
        totals.acked += 1
    elif settled is Settled.SNOOZED:
        totals.snoozed += 1
    elif isinstance(each.outcome, Retried):
        totals.failed += 1
        totals.retried += 1
    else:
        totals.failed += isinstance(each.outcome, DeadLettered)
        totals.dead += 1
    return True


def _is_new(each: Ended) -> bool:
    """Return whether its first attempt ended; a snoozed message starts its first attempt again."""
    row = each.delivery._row
    first = row.attempts == 1 if row.claimed_by else not row.attempts  # expired: not claimed
    return first and each.settled is not Settled.SNOOZED


#: The totals of each worker that runs in this process, by its id.
_by_worker: dict[str, WorkerTotals] = {}


def begin(worker: str) -> WorkerTotals:
    """Start counting for `worker`."""
    totals = _by_worker[worker] = WorkerTotals()
    return totals


def end(worker: str) -> None:
    """Stop counting for `worker`."""
    _by_worker.pop(worker, None)


def totals_of(worker: str) -> WorkerTotals | None:
    """Return the totals of `worker`, if it runs in this process."""
    return _by_worker.get(worker)


def count(ended: Sequence[Ended]) -> None:
    """Count settled deliveries, all claimed by one worker.

    Deliveries that no worker of this process claimed (they expired, or their worker died) count for
    its first worker; a process has only one, unless several run in threads.
    """
    if not ended:
        return
    worker = worker_of(ended[0].delivery._row.claimed_by)
    for totals in [_by_worker[worker]] if worker in _by_worker else list(_by_worker.values())[:1]:
        totals.add(ended)
