"""From claimed rows to whoever runs them, and back to their queues what is not to run here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from django_mq.messages import Delivery
from django_mq.store import settle
from django_mq.worker.database import LOST, Outage, Statements
from django_mq.worker.sorting import line_of
from django_mq.worker.tasks import is_coroutine

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow, Fence
    from django_mq.store import Cursor
    from django_mq.worker.aio import AsyncRunner
    from django_mq.worker.hand import Hand
    from django_mq.worker.queue_backoff import QueueBackoffs
    from django_mq.worker.sorting import Sorter
    from django_mq.worker.tasks import Line, Task

logger = logging.getLogger("django_mq")

#: How often we try to release a row that somebody has locked for a moment.
RELEASE_TRIES = 4


class Intake:
    """Sorts what was claimed and hands it out: tasks to the hand, coroutines to the runner.

    Used by the thread that claims. `freed` is called when rows went back to their queues,
    `uncount` with how many of them had not come to their turn.
    """

    def __init__(
        self,
        *,
        sorter: Sorter,
        hand: Hand,
        runner: AsyncRunner,
        backoffs: QueueBackoffs,
        statements: Statements,
        outage: Outage,
        freed: Callable[[], None],
        uncount: Callable[[int], None],
    ) -> None:
        self._sorter = sorter
        self._hand = hand
        self._runner = runner
        self._backoffs = backoffs
        self._statements = statements
        self._outage = outage
        self._freed = freed
        self._uncount = uncount
        self._unsorted: deque[Delivery] = deque()
        # Lines of which something cannot run here: what was claimed with it goes back.
        self._broken: set[Line] = set()

    def take(self, cursor: Cursor, rows: list[ClaimedRow], *, first: bool, asked_at: float) -> None:
        """Take rows that were claimed just now; those to be `first` go before what is in hand.

        `asked_at`: when the claim was asked for, by `monotonic()`.
        """
        # Of what lapsed nobody knows whether its last handler still runs: it is locked for first.
        asked_at = 0.0 if first else asked_at
        deliveries = [Delivery(row, asked_at) for row in rows]
        self._hand.hold(deliveries)
        self._unsorted.extend(deliveries)
        self.sort(cursor, first=first)

    def sort(self, cursor: Cursor, *, first: bool = False) -> None:
        """Give what was claimed to its handlers; the rest waits if the database is lost."""
        tasks: list[Task] = []
        others: list[int] = []
        behind: list[Fence] = []
        try:
            while self._unsorted:
                if not self._broken:
                    tasks += self._take_ready()
                    if not self._unsorted:
                        break
                delivery = self._unsorted[0]
                line = line_of(delivery._row)
                if line in self._broken:
                    behind.append(self._unsorted.popleft().fence)
                    continue
                task = self._sort_one(cursor, delivery)
                self._unsorted.popleft()
                if task is not None:
                    tasks.append(task)
                    continue
                others.append(delivery.id)
                self._cancel_probes(cursor, [delivery.fence])
                if line is not None:
                    self._broken.add(line)
            self._broken.clear()
        finally:
            if others:
                self._hand.settled(others)
                self._freed()
            if behind:
                self._uncount(len(behind))
                self._release(behind)
                self._freed()
            if tasks:  # else it would wake up executors for nothing
                self._hand_out(tasks, first)

    def _take_ready(self) -> list[Task]:
        try:
            return self._sorter.take_ready(self._unsorted)
        except Exception:  # nothing was taken: `_sort_one()` blames the row that it is about
            return []

    def _sort_one(self, cursor: Cursor, delivery: Delivery) -> Task | None:
        try:
            return self._sorter.sort(cursor, delivery)
        except LOST:
            # What is before them in their lines may run, and fail, meanwhile.
            lines = (line_of(each._row) for each in self._unsorted)
            self._broken.update(filter(None, lines))
            raise
        except Exception:  # the lease lapses, and the attempt counts
            logger.exception(
                "message %s cannot be sorted", delivery.id, extra={"event": "sorting_failed"}
            )
            return None

    def go_on(self) -> None:
        """Start the coroutines whose turn it is in their lines."""
        if coroutines := self._hand.take_coroutines():
            self._start(coroutines)

    def release(self, tasks: list[Task]) -> None:
        """Give back `tasks`, which did not start, and what was not sorted; attempts refunded."""
        fences = [task.delivery.fence for task in tasks]
        fences += [delivery.fence for delivery in self._unsorted]
        self._unsorted.clear()
        self._release(fences)

    def _release(self, fences: list[Fence]) -> None:
        # First: a renewal that is under way has their rows locked for a moment, a later one not.
        self._hand.settled([fence.id for fence in fences])
        tries = RELEASE_TRIES
        try:
            while fences and tries:
                cursor = self._statements.cursor()
                self._cancel_probes(cursor, fences)
                released = settle.release(cursor, fences)
                left = settle.still_ours(cursor, fences) if len(released) < len(fences) else ()
                fences = [fence for fence in fences if fence.id in left]
                tries -= 1
                if fences:
                    self._outage.wait_quietly()
        except LOST:
            self._statements.close()
        if fences:
            logger.warning("could not release %s message(s): their leases lapse", len(fences))

    def _hand_out(self, tasks: list[Task], first: bool) -> None:
        put = self._hand.put_back if first else self._hand.put
        if not any(task.handler.is_async for task in tasks):
            put(tasks)
            return
        coroutines: list[Task] = []
        waiting: list[Task] = []
        for task in tasks:
            if not is_coroutine(task):
                waiting.append(task)
                continue
            if waiting and task.line is not None:  # it may be behind one of these
                put(waiting)
                waiting = []
            if self._hand.admit(task):
                coroutines.append(task)
        if coroutines:
            self._start(coroutines)
        put(waiting)

    def _start(self, coroutines: list[Task]) -> None:
        if not self._runner.is_alive():
            self._runner.start()
        self._runner.submit(coroutines)

    def _cancel_probes(self, cursor: Cursor, fences: list[Fence]) -> None:
        for queue, claimer in self._backoffs.probes():
            if any(fence.claimed_by == claimer for fence in fences):
                self._backoffs.cancel_probe(cursor, queue, claimer)
