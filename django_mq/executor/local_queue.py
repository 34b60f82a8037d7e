"""The local queue: deliveries between claim and settle, from which executors take slices.

Per line (an order key or an ordered queue) only one slice, or one coroutine, runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from time import monotonic

from django_mq.executor.async_slots import Slots
from django_mq.executor.gauge import Gauge
from django_mq.executor.last_starts import LastStarts
from django_mq.executor.lingering import Lingering
from django_mq.executor.pace import Paces
from django_mq.executor.running_tasks import RunningTasks
from django_mq.executor.slice_cut import next_slice
from django_mq.executor.tasks import Line, Slice, Task
from django_mq.executor.unsettled import Unsettled
from django_mq.executor.waiting_coroutines import WaitingCoroutines
from django_mq.executor.waiting_tasks import WaitingTasks
from django_mq.policy.suspect_turns import lets_others_start, stops_others, takes_turns

#: Seconds without a new slice after which the waiting tasks are released.
STUCK_AFTER = 1.0


class LocalQueue:
    """Holds deliveries between claim and settle. Thread-safe.

    A slice has up to `slice_size` messages, a batch handler gets up to `batch`. `poke` wakes the
    worker's loop, which claims, because few tasks wait (`notify_below()`) or an executor is free
    again (`stuck()`); starts `coroutines`; releases tasks; or stops, because nothing is left. Tasks
    wait at most `max_linger` seconds for their list to fill. Coroutines take `slots` as they leave.
    """

    def __init__(
        self,
        *,
        batch: int,
        slice_size: int,
        poke: Callable[[], None],
        max_linger: float,
        slots: Slots,
    ) -> None:
        self._batch = batch
        self._slice_size = slice_size
        self._poke = poke
        self.slots = slots
        self._notify_below = -1
        self._lock = threading.Condition()
        #: The deliveries that were claimed here and are not settled yet.
        self.unsettled = Unsettled()
        lingering = Lingering(batch=batch, max_linger=max_linger)
        self._waiting = WaitingTasks(poke, lingering, self.unsettled.superseded)
        self.running = RunningTasks()
        #: The executor threads that wait for a slice.
        self.free = Gauge()
        self._notify_when_free = self._closed = False
        #: Whether nothing may start until `resume()`.
        self.suspended = False
        #: How many messages of each handler a slice may have.
        self.paces = Paces()
        #: When a message of each lane last started.
        self.last_starts = LastStarts()
        #: The coroutines among the tasks that wait.
        self.coroutines = WaitingCoroutines(
            self._waiting,
            self.running,
            slots=slots,
            last_starts=self.last_starts,
            lock=self._lock,
        )
        #: Queues from which nothing may start.
        self.stopped_queues = self._waiting.stopped_queues

    def put(self, tasks: Iterable[Task]) -> None:
        """Add tasks behind the others."""
        with self._lock:
            self._waiting.add(tasks)
            self._lock.notify_all()

    def put_first(self, tasks: Iterable[Task]) -> None:
        """Add tasks before all others."""
        with self._lock:
            self._waiting.add_first(tasks)
            self._lock.notify_all()

    def take(self) -> Slice | None:
        """Wait for the next slice; None after `close()`. Each slice ends with `done()`."""
        with self._lock:
            while not self._closed:
                if (slice_ := self._next_slice()) is not None:
                    self.last_starts.record(slice_.tasks)
                    return slice_
                self.free.add(1)
                if self._notify_when_free:
                    self._notify_when_free = False
                    self._poke()
                self._lock.wait(self._waiting.wait_timeout())
                self.free.add(-1)
            self.free.add(1)
            return None

    def _next_slice(self) -> Slice | None:
        waiting = self._waiting
        if waiting.lingering:
            waiting.stop_lingering()
        waiting.clear_front()
        if self.running.alone or self.suspended:
            return None
        if waiting.suspects and not self.running.count:
            if waiting.next_suspect_is_async():
                self._poke()  # it starts on the event loop
                return None
            self.running.take(alone=True)
            return waiting.take_suspect()
        if not waiting.ready or stops_others(waiting.suspect_waits_for()):
            return None
        slice_ = next_slice(
            waiting.ready,
            waiting.ordering,
            self.paces.of,
            batch=self._batch,
            slice_size=self._slice_size,
            idle=self.free.count,
        )
        self.running.take(calls=slice_.calls)
        if len(waiting.ready) < self._notify_below:
            self._notify_below = -1
            self._poke()
        return slice_

    def stuck(self) -> bool:
        """Return whether no slice could be taken for STUCK_AFTER seconds.

        Then all executors are busy, or a suspect runs, beside which nothing starts. If so, the
        loop is poked when an executor becomes free.
        """
        with self._lock:
            busy = self.running.alone or not self.free.count
            stuck = busy and monotonic() - self.running.taken_at > STUCK_AFTER
            stuck &= bool(self.running.count)
            self._notify_when_free |= stuck
            return stuck

    def unused(self) -> int:
        """Return the number of executors for which no task is ready.

        The loop is poked when an executor becomes free.
        """
        with self._lock:
            self._notify_when_free = True
            return max(0, self.free.count - len(self._waiting.ready))

    def waits_for_suspect(self, *, coroutines: bool) -> bool:
        """Return whether a suspect has waited to run alone for so long that nothing else starts.

        That takes SUSPECT_WAIT_SECONDS; coroutines are no longer claimed after STUCK_AFTER seconds.
        False while it is the turn of the others.
        """
        with self._lock:
            waits = self._waiting.suspect_waits_for()
        return stops_others(waits) or (
            coroutines and waits > STUCK_AFTER and not lets_others_start(waits)
        )

    def suspect_takes_turns(self) -> bool:
        """Return whether a suspect has waited so long that it takes turns with the others."""
        with self._lock:
            return takes_turns(self._waiting.suspect_waits_for())

    def take_waiting(self, *, suspects: bool = True) -> list[Task]:
        """Remove and return what waits, for the worker to release; `suspects`: those, too."""
        with self._lock:
            return self._waiting.take_all(suspects=suspects)

    def take_to_release(self) -> list[Task]:
        """Remove and return the tasks that must no longer run here, for the worker to release."""
        with self._lock:
            to_release, self._waiting.to_release = self._waiting.to_release, []
            return to_release

    def halt_line(self, line: Line) -> None:
        """Mark for release the tasks behind a delivery of `line` that was not acked."""
        with self._lock:
            self._waiting.ordering.halt_line(line)
            self._waiting.drop(lambda task: task.line == line)

    def is_unwanted(self, task: Task) -> bool:
        """Return whether `task` must not start (see `WaitingTasks`)."""
        return self._waiting.is_unwanted(task)

    def stop_queue(self, queue: str, before: datetime | None = None) -> None:
        """Start nothing of `queue` that was claimed before `before` (None: nothing at all).

        Its waiting tasks are marked for release. The next call for the queue replaces this one.
        """
        with self._lock:
            self.stopped_queues[queue] = before
            self._waiting.drop(lambda task: self.stopped_queues.has(task.delivery))

    def drop(self, queues: Collection[str], *, keeping: Collection[str]) -> None:
        """Mark for release the waiting tasks of `queues`, except those in the claims `keeping`."""
        with self._lock:
            self._waiting.drop(
                lambda task: (
                    task.delivery.queue in queues and task.delivery.fence.claimed_by not in keeping
                )
            )

    def waiting_queues(self) -> set[str]:
        """Return the ordered queues whose first task here could start if a thread were free."""
        with self._lock:
            return self._waiting.waiting_queues()

    def cancel_start(self, coroutines: list[Task]) -> None:
        """Note that these coroutines could not start; nothing behind them in their lines does."""
        for task in coroutines:
            if task.line is not None:
                self.halt_line(task.line)
        self.slots.give_back(len(coroutines))
        self.coroutines_done(*[task.line for task in coroutines])

    def done(self, slice_: Slice) -> None:
        """Note that the tasks of `slice_` have ended."""
        self._end(1, slice_.lines, behind=slice_.put_back)

    def coroutines_done(self, *lines: Line | None) -> None:
        """Note that coroutines are settled, or could not start: one for each of `lines`."""
        self._end(len(lines), lines)

    def _end(self, count: int, lines: Collection[Line | None], *, behind: bool = False) -> None:
        with self._lock:
            was_alone = self.running.end(count)
            for line in lines:
                self._waiting.free_line(line, behind=behind)
            if self._waiting.suspects or was_alone or any(lines):
                self._lock.notify_all()
        if was_alone or not (self.running.count or self.unsettled):
            self._poke()  # async handlers may start again, or nothing is left

    def suspend(self) -> list[Task]:
        """Start nothing until `resume()`; return the tasks that did not start."""
        with self._lock:
            self.suspended = True
        return self.take_waiting()

    def resume(self) -> None:
        """Undo `suspend()`."""
        with self._lock:
            self.suspended = False
            self._lock.notify_all()

    def close(self) -> list[Task]:
        """Start nothing more; return the tasks that did not start."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        return self.take_waiting()

    def notify_below(self, count: int) -> None:
        """Poke the loop as soon as fewer than `count` tasks wait."""
        self._notify_below = count

    def waiting(self) -> int:
        """The number of tasks that wait to be taken."""
        return len(self._waiting)

    def calls(self) -> int:
        """The number of calls, or messages of slices, that wait to be taken."""
        with self._lock:
            return self._waiting.calls()

    def idle(self) -> bool:
        """Return whether nothing waits and nothing runs."""
        with self._lock:
            waiting, running = self._waiting, self.running.count
            return not (self.unsettled or running or waiting.ready or waiting.suspects)

    def exclusive(self) -> bool:
        """Return whether a suspect runs, or waits for everything else to end.

        False while it waits, but it is the turn of the others.
        """
        with self._lock:
            waits = self._waiting.suspect_waits_for()
        return self.running.alone or (waits >= 0 and not lets_others_start(waits))
