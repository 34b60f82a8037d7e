"""When messages of each lane last started in this process."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from time import monotonic

from django_mq.executor.tasks import Task


class LastStarts:
    """The time of the last start in each lane, which is one queue at one priority. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The messages of an ordered queue start in line, whichever of its lanes was claimed from:
        # their times count for all its lanes, and are kept without a priority.
        self._at: dict[tuple[str, int | None], float] = {}

    def record(self, tasks: Iterable[Task]) -> None:
        """Note that `tasks` start now."""
        rows = (task.delivery._row for task in tasks)
        lanes = {(row.queue, None if row.ordered else row.priority) for row in rows}
        with self._lock:
            self._at.update(dict.fromkeys(lanes, monotonic()))

    def at(self, lane: tuple[str, int]) -> float:
        """Return when a message of `lane` last started, by `monotonic()`; if none did, -infinity.

        The answer for a lane that was forgotten is -infinity, too.
        """
        never = float("-inf")
        return max(self._at.get(lane, never), self._at.get((lane[0], None), never))

    def keep(self, lanes: Collection[tuple[str, int]]) -> None:
        """Forget all lanes but `lanes`."""
        known = {*lanes, *((queue, None) for queue, _ in lanes)}
        with self._lock:
            self._at = {lane: at for lane, at in self._at.items() if lane in known}
