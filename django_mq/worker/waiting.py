"""Tasks that wait for their line: what is before them in it runs here now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from django_mq.worker.tasks import is_coroutine

if TYPE_CHECKING:
    from django_mq.worker.tasks import Line, Task


class Lines:
    """The lines of which something runs here, or is to run before all else, and who waits.

    `broken` are lines whose last task was not acked, until their slice is done. Not safe for
    threads: the hand has the lock.
    """

    def __init__(self) -> None:
        self._out: dict[Line, deque[Task]] = {}
        self.broken: set[Line | None] = set()
        self.coroutines: list[Task] = []
        self.waiting = 0

    def is_out(self, line: Line | None) -> bool:
        """Say whether something of `line` runs."""
        return line in self._out

    def occupy(self, line: Line | None) -> None:
        """Something of `line` runs, or is to be the next of it."""
        if line is not None:
            self._out.setdefault(line, deque())

    def wait(self, task: Task, line: Line) -> None:
        """Let `task` wait for its line, behind those that do already."""
        self._out[line].append(task)
        self.waiting += 1

    def wait_first(self, task: Task, line: Line) -> None:
        """Let `task` wait for its line, before those that do already."""
        self._out[line].appendleft(task)
        self.waiting += 1

    def breaks(self, line: Line) -> None:
        """Nothing more of `line` may run before it is free."""
        if line in self._out:
            self.broken.add(line)

    def free(self, line: Line) -> list[Task]:
        """What ran of `line` is done; return the tasks that may run now.

        A coroutine goes on by itself (`take_coroutines()`), with the others behind it.
        """
        self.broken.discard(line)
        tasks = self._out.pop(line, deque())
        self.waiting -= len(tasks)
        if tasks and is_coroutine(tasks[0]):
            self.go_on(tasks.popleft(), line)
            self._out[line] = tasks
            self.waiting += len(tasks)
            return []
        return list(tasks)

    def go_on(self, task: Task, line: Line) -> None:
        """It is the turn of `task`, a coroutine, in its line."""
        self.occupy(line)
        self.coroutines.append(task)

    def count_coroutines(self) -> int:
        """How many coroutines wait for their line, or to be taken."""
        if not self.waiting:
            return len(self.coroutines)
        waiting = sum(is_coroutine(task) for tasks in self._out.values() for task in tasks)
        return waiting + len(self.coroutines)

    def drop_coroutines(self, unwanted: Callable[[Task], bool]) -> list[Task]:
        """Return the coroutines that may start and are `unwanted`; their lines stay out."""
        dropped = [task for task in self.coroutines if unwanted(task)]
        if dropped:
            self.coroutines = [task for task in self.coroutines if not unwanted(task)]
        return dropped

    def take_coroutines(self) -> list[Task]:
        """Return the coroutines that may start now, once."""
        coroutines, self.coroutines = self.coroutines, []
        return coroutines

    def take_waiting(self) -> list[Task]:
        """Return everything that waits for its line, which stays out."""
        return self.drop(lambda task: True)

    def drop(self, unwanted: Callable[[Task], bool]) -> list[Task]:
        """Return what waits and is `unwanted`; it waits no more."""
        dropped: list[Task] = []
        for line, tasks in self._out.items():
            gone = [task for task in tasks if unwanted(task)]
            if gone:
                dropped += gone
                self._out[line] = deque(task for task in tasks if not unwanted(task))
        self.waiting -= len(dropped)
        return dropped
