"""Messages of batch handlers that wait a moment, so that their lists fill."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from django_mq.executor.tasks import Task, max_in_call
from django_mq.handlers import Handler

#: The shortest lease is this many times the longest linger, so that no list needs renewals.
LINGER_SHARE = 4


class Lingering:
    """The tasks of each handler that wait until their list is full or its first task is overdue.

    A list has up to `batch` messages, or the handler's `max_batch`. `max_linger` bounds the wait,
    in seconds. Not thread-safe.
    """

    def __init__(self, *, batch: int, max_linger: float) -> None:
        self._batch = batch
        self._max_linger = max_linger
        self._lists: dict[Handler, list[Task]] = {}
        self._due: dict[Handler, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def add(self, task: Task) -> list[Task]:
        """Let `task` wait; return the tasks of its list if the list is full now, else none."""
        handler = task.handler
        waiting = self._lists.setdefault(handler, [])
        if not waiting:
            self._due[handler] = monotonic() + min(handler.linger, self._max_linger)
        waiting.append(task)
        return self._take(handler) if len(waiting) >= max_in_call(task, self._batch) else []

    def size(self, handler: Handler) -> int:
        """Return how many messages a full list of `handler` has."""
        return min(self._batch, handler.max_batch or self._batch)

    def take_due(self, now: float) -> list[list[Task]]:
        """Remove and return the lists that are due at `now`, by the monotonic clock."""
        return [self._take(handler) for handler, at in list(self._due.items()) if at <= now]

    def next_at(self) -> float:
        """Return when the next list is due; infinity if nothing waits."""
        return min(self._due.values(), default=float("inf"))

    def drop(self, unwanted: Callable[[Task], bool]) -> list[Task]:
        """Remove and return `unwanted` tasks."""
        dropped: list[Task] = []
        for handler, tasks in list(self._lists.items()):
            out = [task for task in tasks if unwanted(task)]
            if out:
                dropped += out
                tasks[:] = [task for task in tasks if task not in out]
            if not tasks:
                self._take(handler)
        return dropped

    def _take(self, handler: Handler) -> list[Task]:
        del self._due[handler]
        return self._lists.pop(handler)
