"""Messages of batch handlers that wait a moment, so that their lists fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

from django_mq.executor.tasks import Task, max_in_call
from django_mq.handlers import Handler

#: The handler of a list, and the batch size of its queues.
_ListKey = tuple[Handler, int | None]


class Lingering:
    """The tasks of each handler that wait until their list is full or its first task is overdue.

    A list has up to `batch` messages, or fewer by the options of the handler and of the queue.
    `max_linger` bounds the wait, in seconds. Not thread-safe.
    """

    def __init__(self, *, batch: int, max_linger: float) -> None:
        self._batch = batch
        self._max_linger = max_linger
        self._lists: dict[_ListKey, list[Task]] = {}
        self._due: dict[_ListKey, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def __iter__(self) -> Iterator[Task]:
        for tasks in self._lists.values():
            yield from tasks

    def add(self, task: Task) -> list[Task]:
        """Let `task` wait; return the tasks of its list if the list is full now, else none."""
        key = task.handler, task.batch_size
        waiting = self._lists.setdefault(key, [])
        if not waiting:
            self._due[key] = monotonic() + min(task.handler.linger, self._max_linger)
        waiting.append(task)
        return self._take(key) if len(waiting) >= self.limit(task) else []

    def limit(self, task: Task) -> int:
        """Return how many messages the list of `task` has when it is full."""
        return max_in_call(task, self._batch)

    def take_due(self, now: float) -> list[list[Task]]:
        """Remove and return the lists that are due at `now`, by the monotonic clock."""
        return [self._take(key) for key, at in list(self._due.items()) if at <= now]

    def next_at(self) -> float:
        """Return when the next list is due; infinity if nothing waits."""
        return min(self._due.values(), default=float("inf"))

    def drop(self, unwanted: Callable[[Task], bool]) -> list[Task]:
        """Remove and return `unwanted` tasks."""
        dropped: list[Task] = []
        for key, tasks in list(self._lists.items()):
            out = [task for task in tasks if unwanted(task)]
            if out:
                dropped += out
                tasks[:] = [task for task in tasks if task not in out]
            if not tasks:
                self._take(key)
        return dropped

    def _take(self, key: _ListKey) -> list[Task]:
        del self._due[key]
        return self._lists.pop(key)
