"""The tasks of a local queue that have not started."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from time import monotonic

from django_mq.executor.lingering import Lingering
from django_mq.executor.ordering import Ordering
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.executor.tasks import Line, Slice, Task, is_coroutine, is_listed
from django_mq.messages import PlainFence, fence_of


class WaitingTasks:
    """Tasks that are `ready`, or wait for their list or line; and suspects, which run alone.

    `suspects` pairs each suspect with the time at which it began to wait. `to_release` has tasks
    that must not start here, until the worker releases them. `poke` wakes the worker's loop when
    there are tasks to release, or a coroutine may start. A claim that is `superseded` leaves before
    the next claim of its message comes: a slice or a list tells its messages apart by id alone. Not
    thread-safe: LocalQueue holds its lock.
    """

    def __init__(
        self, poke: Callable[[], None], lingering: Lingering, superseded: Collection[PlainFence]
    ) -> None:
        self._poke = poke
        self.lingering = lingering
        self._superseded = superseded
        self.ready: deque[Task] = deque()
        self.suspects: deque[tuple[float, Task]] = deque()
        self.to_release: list[Task] = []
        self.ordering = Ordering()
        self.stopped_queues = StoppedQueues()

    def __len__(self) -> int:
        startable = len(self.ready) + len(self.suspects)
        return startable + self.ordering.waiting + len(self.lingering)

    def calls(self) -> int:
        """The number of calls that the tasks make, lingering ones excluded; a full list is one.

        A list that is not full counts as none: the next claim may fill it.
        """
        limit = self.lingering.limit
        listed = Counter((task.handler, limit(task)) for task in self.ready if is_listed(task))
        lists = sum(number // size for (_, size), number in listed.items())
        return len(self) - len(self.lingering) - listed.total() + lists

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks behind the others."""
        self._drop_superseded()
        must_check = self.ordering.halted_lines or self.stopped_queues or self._superseded
        for task in tasks:
            if must_check and self.is_unwanted(task):
                self.to_release.append(task)
            elif task.delivery._row.suspect and task.line is None:
                self.suspects.append((monotonic(), task))
            elif task.handler.is_async and is_coroutine(task):
                self._add_coroutine(task)
            elif task.handler.linger and self._may_linger(task):
                self.ready.extend(self.lingering.add(task))
            else:
                self.ready.append(task)
        if must_check and self.to_release:
            self._poke()

    def _add_coroutine(self, task: Task) -> None:
        """Let a coroutine wait for a slot, or first for its line."""
        line = task.line
        if line is not None and any(waiting.line == line for waiting in self.ready):
            self.ready.append(task)  # behind a task that is not a coroutine
        elif line is not None and self.ordering.is_busy(line):
            self.ordering.wait(task, line)
        else:
            self.ordering.add_coroutine(task)

    def _may_linger(self, task: Task) -> bool:
        """Return whether `task` may wait for its list to fill: all tasks of its line do so."""
        row = task.delivery._row
        return not (task.handler.is_async or row.ordered or (row.attempts > 1 and row.key is None))

    def stop_lingering(self) -> None:
        """Make the tasks ready that have waited long enough for their list to fill."""
        for tasks in self.lingering.take_due(monotonic()):
            self.ready.extend(tasks)

    def add_first(self, tasks: Iterable[Task]) -> None:
        """Add tasks before all others."""
        self._drop_superseded()
        coroutines: list[Task] = []
        others: list[Task] = []
        lines: set[Line | None] = set()
        for task in tasks:
            line = task.line
            begins = line is None or not (line in lines or self.ordering.is_busy(line))
            if begins and is_coroutine(task) and not self.is_unwanted(task):
                coroutines.append(task)
            else:
                others.append(task)
            lines.add(line)
        self.ordering.add_coroutines_first(coroutines)
        self._add_others_first(others)

    def _add_others_first(self, tasks: list[Task]) -> None:
        for task in reversed(tasks):
            if self.is_unwanted(task):
                self.to_release.append(task)
            elif task.delivery._row.suspect and task.line is None:
                # Its wait begins anew: it has just had its turn, and a long wait stops all others.
                self.suspects.appendleft((monotonic(), task))
            elif task.line is not None and self.ordering.is_busy(task.line):
                self.ordering.wait_first(task, task.line)  # until its slice is done
            else:
                self.ready.appendleft(task)
        if self.to_release:
            self._poke()

    def is_unwanted(self, task: Task) -> bool:
        """Return whether `task` must not start.

        Its line is halted, its queue is stopped, or its message was claimed again.
        """
        stopped = self.stopped_queues
        if task.line in self.ordering.halted_lines or self._is_superseded(task):
            return True
        return bool(stopped) and stopped.has(task.delivery)

    def _is_superseded(self, task: Task) -> bool:
        return bool(self._superseded) and fence_of(task.delivery._row) in self._superseded

    def _drop_superseded(self) -> None:
        """Mark for release the superseded tasks, and the tasks behind them in their lines.

        The latter may still be ours, and would start before the later claim.
        """
        if not self._superseded:
            return
        dropped: set[PlainFence] = set()
        lines: set[Line] = set()
        for task in self._line_by_line():
            if self._is_superseded(task) or task.line in lines:
                dropped.add(fence_of(task.delivery._row))
                lines.update([] if task.line is None else [task.line])
        if dropped:
            self.drop(lambda task: fence_of(task.delivery._row) in dropped)

    def _line_by_line(self) -> Iterator[Task]:
        """Iterate over all tasks; those of a line come in the order in which they start."""
        yield from (task for _, task in self.suspects)
        yield from self.ordering
        yield from self.ready
        yield from self.lingering

    def take_all(self, *, suspects: bool) -> list[Task]:
        """Remove and return everything; without `suspects`, those stay."""
        self.drop(lambda task: suspects or not task.delivery._row.suspect)
        waiting, self.to_release = self.to_release, []
        return waiting

    def drop(self, unwanted: Callable[[Task], bool]) -> None:
        """Mark for release the tasks that are `unwanted`."""
        dropped = [task for task in self.ready if unwanted(task)]
        if dropped:
            self.ready = deque(task for task in self.ready if not unwanted(task))
        dropped += self.lingering.drop(unwanted) + self.ordering.drop(unwanted)
        # Each of these is the next of a line from which nothing runs yet.
        next_ = [task for _, task in self.suspects if unwanted(task)]
        if next_:
            self.suspects = deque(entry for entry in self.suspects if not unwanted(entry[1]))
        next_ += self.ordering.drop_coroutines(unwanted)
        for task in next_:
            self.free_line(task.line)
        dropped += next_
        if dropped:
            self.to_release += dropped
            self._poke()

    def drop_coroutines(self) -> None:
        """Mark for release the coroutines that wait for a slot, and all that waits behind them."""
        dropped = [task for _, task in self.ordering.coroutines]
        ids = {task.delivery.id for task in dropped}
        lines = {task.line for task in dropped} - {None}
        self.drop(lambda task: task.line in lines or task.delivery.id in ids)

    def count_coroutines(self) -> int:
        """The number of coroutines that wait for a slot or their line."""
        ready = sum(task.line is not None and is_coroutine(task) for task in self.ready)
        return ready + self.ordering.count_coroutines()

    def free_line(self, line: Line | None, *, behind: bool = False) -> None:
        """Note that the running tasks of `line` have ended.

        Tasks that waited for it come first, or all tasks of the line come `behind` the others.
        """
        if line is None:
            return
        freed = self.ordering.free(line)
        if behind:
            freed += [task for task in self.ready if task.line == line]
            self.ready = deque(task for task in self.ready if task.line != line)
            self.ready.extend(freed)
        else:
            self.ready.extendleft(reversed(freed))
        if self.ordering.coroutines:
            self._poke()

    def waiting_queues(self) -> set[str]:
        """Return the ordered queues that have ready tasks, while none of their tasks runs."""
        ordered = (task for task in self.ready if task.delivery._row.ordered)
        return {task.delivery.queue for task in ordered if not self.ordering.is_busy(task.line)}

    def clear_front(self) -> None:
        """Take tasks that cannot start now from the front of `ready`.

        A task waits while its line is busy. A suspect or a coroutine that is next in its line
        occupies the line, and waits with the other suspects or coroutines.
        """
        ready = self.ready
        while ready and (line := ready[0].line) is not None:
            if self.ordering.is_busy(line):
                self.ordering.wait(ready.popleft(), line)
            elif ready[0].delivery._row.suspect:
                self.ordering.occupy(line)
                self.suspects.append((monotonic(), ready.popleft()))
            elif is_coroutine(ready[0]):
                self.ordering.add_coroutine(ready.popleft())
                self._poke()
            else:
                break

    def wait_timeout(self) -> float | None:
        """Return the seconds until something may start without a notification; None: for ever."""
        wait = self.lingering.next_at() - monotonic()
        if self.suspects:
            wait = min(wait, 1.0)
        return None if wait == float("inf") else max(0.0, wait)

    def next_suspect_is_async(self) -> bool:
        """Return whether there is a suspect, and the first one runs on the event loop."""
        return bool(self.suspects) and self.suspects[0][1].handler.is_async

    def take_suspect(self) -> Slice:
        """Remove the first suspect, and return it as a slice."""
        suspect = self.suspects.popleft()[1]
        lines = {suspect.line} if suspect.line is not None else set()
        return Slice([suspect], alone=True, lines=lines)

    def suspect_waits_for(self) -> float:
        """Return the seconds for which the first suspect has waited; -infinity without one."""
        return monotonic() - self.suspects[0][0] if self.suspects else float("-inf")
