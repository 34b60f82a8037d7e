"""Which lines are busy, and the tasks that wait for them.

A line is an order key of a handler, or an ordered queue. It is busy while any of its messages runs.

A line is halted once one of its messages does not end well: nothing behind that message starts.
Each part that takes messages one after another keeps `halted_lines` for its own span:

- `Dispatch`, while it sorts claimed rows;
- `Ordering`, until the slice of the line is done;
- `SliceState`, for one slice, and `Executor` while it repeats the deliveries of that slice;
- `split_started()` and `BatchCall.end()`, for one call outside a transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from django_mq.executor.tasks import Line, Task, is_coroutine


class Ordering:
    """The lines that are busy, or have chosen their next task, and the tasks that wait behind it.

    `halted_lines` are the lines whose last task was not acked, until their slice is done.
    `coroutines` may start: each is paired with the time at which it began to wait for a slot. Not
    thread-safe: LocalQueue holds its lock.
    """

    def __init__(self) -> None:
        self._busy: dict[Line, deque[Task]] = {}
        self.halted_lines: set[Line | None] = set()
        self.coroutines: deque[tuple[float, Task]] = deque()
        self.waiting = 0

    def __iter__(self) -> Iterator[Task]:
        """Iterate over the coroutines that may start, then over what waits for its line."""
        yield from (task for _, task in self.coroutines)
        for tasks in self._busy.values():
            yield from tasks

    def is_busy(self, line: Line | None) -> bool:
        """Return whether any task of `line` runs."""
        return line in self._busy

    def occupy(self, line: Line | None) -> None:
        """Mark `line` as busy: a task of it runs, or is chosen to run next."""
        if line is not None:
            self._busy.setdefault(line, deque())

    def wait(self, task: Task, line: Line) -> None:
        """Let `task` wait for its line, after the tasks that already wait."""
        self._busy[line].append(task)
        self.waiting += 1

    def wait_first(self, task: Task, line: Line) -> None:
        """Let `task` wait for its line, before the tasks that already wait."""
        self._busy[line].appendleft(task)
        self.waiting += 1

    def halt_line(self, line: Line) -> None:
        """Start no more tasks of `line` until it is free."""
        if line in self._busy:
            self.halted_lines.add(line)

    def free(self, line: Line) -> list[Task]:
        """Note that the running tasks of `line` have ended; return those that may run now.

        Returns none if a coroutine is next: it joins `coroutines`, and the others wait behind it.
        """
        self.halted_lines.discard(line)
        tasks = self._busy.pop(line, deque())
        self.waiting -= len(tasks)
        if tasks and is_coroutine(tasks[0]):
            self.add_coroutine(tasks.popleft())
            self._busy[line] = tasks
            self.waiting += len(tasks)
            return []
        return list(tasks)

    def add_coroutine(self, task: Task) -> None:
        """Let `task`, a coroutine that is next in its line if any, wait for a slot."""
        self.occupy(task.line)
        self.coroutines.append((monotonic(), task))

    def add_coroutines_first(self, tasks: Sequence[Task]) -> None:
        """Let coroutines wait for slots before all others."""
        for task in reversed(tasks):
            self.occupy(task.line)
            self.coroutines.appendleft((monotonic(), task))

    def slot_wanted_since(self) -> float:
        """Return when the oldest coroutine began to wait for a slot; infinity if there is none."""
        return min((at for at, _ in self.coroutines), default=float("inf"))

    def count_coroutines(self) -> int:
        """The number of coroutines that wait for their line, or for a slot."""
        if not self.waiting:
            return len(self.coroutines)
        waiting = sum(is_coroutine(task) for tasks in self._busy.values() for task in tasks)
        return waiting + len(self.coroutines)

    def drop_coroutines(self, unwanted: Callable[[Task], bool]) -> list[Task]:
        """Remove and return `unwanted` coroutines that may start; their lines stay busy."""
        dropped = [task for _, task in self.coroutines if unwanted(task)]
        if dropped:
            self.coroutines = deque(each for each in self.coroutines if not unwanted(each[1]))
        return dropped

    def take_coroutines(self, count: int, *, lists: bool) -> list[Task]:
        """Remove and return the first `count` coroutines that may start.

        Without `lists`, only those before the first of a list.
        """
        taken: list[Task] = []
        while len(taken) < count and self.coroutines:
            if not lists and self.coroutines[0][1].handler.batch:
                break
            taken.append(self.coroutines.popleft()[1])
        return taken

    def drop(self, unwanted: Callable[[Task], bool]) -> list[Task]:
        """Remove and return `unwanted` tasks that wait for their line; the lines stay busy."""
        dropped: list[Task] = []
        for line, tasks in self._busy.items():
            out = [task for task in tasks if unwanted(task)]
            if out:
                dropped += out
                self._busy[line] = deque(task for task in tasks if not unwanted(task))
        self.waiting -= len(dropped)
        return dropped
