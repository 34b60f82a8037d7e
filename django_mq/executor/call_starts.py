"""The starts of async calls: until its handler is called, the worker may take a message back."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from django_mq.executor import reports
from django_mq.executor.async_settler import AsyncSettler, StartAnswer
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.leased_call import split_started
from django_mq.executor.lingering import Lingering
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard import Scoreboard
from django_mq.executor.scoreboard_entries import CallEntries
from django_mq.executor.tasks import Task, fences, has_expired, may_start_unlocked
from django_mq.messages import PlainFence


class CallStarts:
    """Holds coroutines with slots from their hand-over to the loop until their handlers are called.

    They are handed over in lists; those of batch handlers linger until their lists are full; then
    each call waits for its turn on the loop, or for its leases. `create` creates the call of some
    tasks, with their entries on the scoreboard, at `indexes`. A claim that `is_superseded()` never
    begins: a later claim of its message may be in the same list, which tells them apart by id.

    Whoever removes a list or a call owns it: the methods of deques and dicts that remove are
    atomic, so that only the lingering tasks need a lock.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        scoreboard: Scoreboard,
        indexes: Sequence[int],
        batch: int,
        settler: AsyncSettler,
        is_superseded: Callable[[PlainFence], bool],
        create: Callable[[list[Task], CallEntries], None],
    ) -> None:
        self._unlocked_for = context.unlocked_for
        self._scoreboard = scoreboard
        self._free = list(indexes)
        self._settler = settler
        self._is_superseded = is_superseded
        self._create = create
        self._handed: deque[list[Task]] = deque()
        self._lingering = Lingering(batch=batch, max_linger=context.max_linger)
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._unbegun: dict[CallEntries, list[Task]] = {}

    @property
    def waiting(self) -> bool:
        """Whether anything but lingering tasks waits to start."""
        return bool(self._handed or self._unbegun)

    def hand_over(self, tasks: list[Task]) -> None:
        """Hand `tasks` over; the loop must be told to call `start_handed()` for each list."""
        self._handed.append(tasks)

    def take_back(self) -> list[Task]:
        """Remove and return the tasks whose handlers were not called. From any thread.

        Their slots stay taken. Calls that were created for them will end without calling anything.
        """
        tasks: list[Task] = []
        while self._handed:
            tasks += self._next_handed()
        tasks += [task for together in self._take_due(float("inf")) for task in together]
        for entries in list(self._unbegun):
            if (of_call := self._unbegun.pop(entries, None)) is not None:
                tasks += of_call
                entries.end()
                self.free(entries)
        return tasks

    # ---- on the loop

    def start_handed(self) -> None:
        """Start the next list that was handed over, unless it was taken back."""
        if tasks := self._next_handed():
            self.start(tasks)

    def start(self, tasks: list[Task]) -> None:
        """Create the calls of `tasks`, or let them linger."""
        lingers = False
        for task in tasks:
            if self._lingering.limit(task) == 1:
                self._create_call([task])
                continue
            with self._lock:
                full = self._lingering.add(task)
            if full:
                self._create_call(full)
            else:
                lingers = True
        if lingers:
            self._start_due()

    def start_lingering(self) -> None:
        """Create the calls of all lists: nothing more will come to fill them."""
        for together in self._take_due(float("inf")):
            self._create_call(together)

    async def ready(self, tasks: list[Task], entries: CallEntries) -> list[Task]:
        """Return the tasks whose call begins now; settle those that may not start.

        None begins if they were taken back.
        """
        asked_at = lease_clock()
        since = asked_at - self._unlocked_for
        if all(self._may_begin(task, since) for task in tasks):
            return tasks if self.begin(entries) else []
        answer: StartAnswer = asyncio.get_running_loop().create_future()
        self._settler.start_leases(self._latest(tasks), answer)
        started = await answer
        if not self.begin(entries):
            return []
        latest = self._latest(tasks)  # a freeze may have superseded one whose lease was given
        barred, ready = split_started(latest, started, asked_at=asked_at)
        barred += [Ended(task.delivery, Settled.LOST) for task in tasks if task not in latest]
        for each in barred:
            if each.settled is Settled.LOST:
                reports.lease_lost(each.delivery)
        if barred:
            self._settler.settle(barred, tasks, call_ended=False)
        return ready

    def begin(self, entries: CallEntries) -> bool:
        """Begin a call: from now on nobody takes it back. Returns False if that has happened."""
        if self._unbegun.pop(entries, None) is not None:
            entries.owned_by_loop = True
        return entries.owned_by_loop

    def free(self, entries: CallEntries) -> None:
        """Free the places of a call on the scoreboard."""
        self._free.extend(entries.indexes)

    def _may_begin(self, task: Task, since: float) -> bool:
        """Return whether the call of `task` may begin without asking the database."""
        if not may_start_unlocked(task, since) or has_expired(task.delivery):
            return False
        return not self._is_superseded(task.delivery.fence)

    def _latest(self, tasks: list[Task]) -> list[Task]:
        """Return the tasks whose claims are not superseded."""
        return [task for task in tasks if not self._is_superseded(task.delivery.fence)]

    def _create_call(self, tasks: list[Task]) -> None:
        indexes = [self._free.pop() for _ in tasks]
        entries = CallEntries(self._scoreboard, indexes, fences(tasks))
        self._unbegun[entries] = tasks
        self._create(tasks, entries)

    def _next_handed(self) -> list[Task]:
        """Remove and return the next list; an empty one if another thread took the last."""
        try:
            return self._handed.popleft()
        except IndexError:
            return []

    def _start_due(self) -> None:
        """Create the calls whose lists have waited long enough."""
        for together in self._take_due(monotonic()):
            self._create_call(together)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            wait = self._lingering.next_at() - monotonic()
        if wait < float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, wait), self._start_due)

    def _take_due(self, now: float) -> list[list[Task]]:
        with self._lock:
            return self._lingering.take_due(now)
