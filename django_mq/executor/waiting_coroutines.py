"""Which coroutines of the local queue start next, as slots become free."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import monotonic

from django_mq.executor.async_slots import Slots
from django_mq.executor.last_starts import LastStarts
from django_mq.executor.running_tasks import RunningTasks
from django_mq.executor.tasks import Task
from django_mq.executor.waiting_tasks import WaitingTasks

#: Seconds that a coroutine waits for a slot. After that, other processes may have a free one.
SLOT_WAIT_SECONDS = 1.0


class WaitingCoroutines:
    """The coroutines among the `waiting` tasks of a local queue, whose `lock` guards them."""

    def __init__(
        self,
        waiting: WaitingTasks,
        running: RunningTasks,
        *,
        slots: Slots,
        last_starts: LastStarts,
        lock: AbstractContextManager[object],
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._slots = slots
        self._last_starts = last_starts
        self._lock = lock

    def take(self, *, lists: bool = True) -> list[Task]:
        """Return coroutines that are to start now, and have slots; of lists only with `lists`.

        They count as running from now on. None starts beside a suspect; one of an async handler is
        returned alone, while nothing else runs.
        """
        waiting, running = self._waiting, self._running
        if not (waiting.ordering.coroutines or waiting.suspects):
            return []
        with self._lock:
            if not running.count and waiting.next_suspect_is_async():
                running.take(alone=True)
                coroutines = waiting.take_suspect().tasks
            else:
                room = 0 if running.alone else self._slots.room()
                if coroutines := waiting.ordering.take_coroutines(room, lists=lists):
                    running.start_coroutines(len(coroutines))
            if coroutines:
                self._slots.take(len(coroutines))
                self._last_starts.record(coroutines)
            return coroutines

    def overdue_in(self) -> float:
        """Return the seconds until coroutines have waited too long for a slot; may be infinite."""
        with self._lock:
            since = self._waiting.ordering.slot_wanted_since()
        return max(0.0, since + SLOT_WAIT_SECONDS - monotonic())

    def release(self, *, overdue: bool) -> None:
        """Mark for release those that wait for a slot; `overdue`: only if one waits too long."""
        if not overdue or self.overdue_in() == 0.0:
            with self._lock:
                self._waiting.drop_coroutines()

    def want_poke(self) -> bool:
        """Return whether coroutines that wait have free slots, or more are to be claimed."""
        waiting = len(self._waiting.ordering.coroutines)
        return (waiting > 0 and self._slots.room() > 0) or self._slots.to_claim(waiting) > 0

    def count(self) -> int:
        """The number of coroutines that wait here: each will need a slot."""
        with self._lock:
            return self._waiting.count_coroutines()
