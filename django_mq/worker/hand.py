"""What this process has in hand: claimed, not yet settled. Executors take slices from it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.handlers import Handler
    from django_mq.messages import Delivery, Fence

#: Seconds that a suspect waits for a moment in which nothing else runs; then nothing else starts.
SUSPECT_PATIENCE = 10.0
#: Seconds without a new slice after which what is in hand is given back.
STUCK_AFTER = 1.0


class Task(NamedTuple):
    """A delivery and the handler that it is for."""

    delivery: Delivery
    handler: Handler
    timeout: float


@dataclass(slots=True)
class Pace:
    """How many messages of one handler a slice may have: doubles while it keeps the time.

    After a conflict (deadlock, serialization) it is one, and for a while does not grow.
    """

    limit: int = 1
    patience: int = 0
    still: int = 0

    def kept_time(self, ran: int, most: int) -> None:
        """A slice with `ran` messages of this handler ended in time."""
        if self.still > 0:
            self.still -= ran
        elif ran >= self.limit:
            self.limit = min(self.limit * 2, most)

    def overran(self) -> None:
        """A slice did not end in time."""
        self.limit = max(1, self.limit // 2)

    def conflict(self) -> None:
        """Messages of this handler stood in each other's way: run them one by one for long."""
        self.limit = 1
        self.patience = min(max(500, self.patience * 4), 100_000)
        self.still = self.patience


@dataclass(slots=True)
class Slice:
    """Tasks that run in one transaction, or one that runs outside any."""

    tasks: list[Task] = field(default_factory=list)
    alone: bool = False


class Hand:
    """Tasks between claim and settle. `on_room` is called when few are left to take, and when
    nothing is left at all.

    `most` is how many messages a slice may have, `batch` how many a batch handler may get.
    """

    def __init__(self, *, batch: int, most: int, on_room: Callable[[], None]) -> None:
        self._batch = batch
        self._most = most
        self._on_room = on_room
        self._tell_below = -1
        self._lock = threading.Condition()
        self._ready: deque[Task] = deque()
        self._suspects: deque[tuple[float, Task]] = deque()
        self._running = 0
        self._free = 0
        self._taken_at = monotonic()
        self._tell_when_free = False
        self._alone = False
        self._closed = False
        self._paces: dict[str, Pace] = {}
        self._fences: dict[int, tuple[str, Fence]] = {}

    def put(self, tasks: Iterable[Task]) -> None:
        """Add claimed tasks, behind what is there; suspects go aside."""
        with self._lock:
            for task in tasks:
                self._fences[task.delivery.id] = (task.delivery.queue, task.delivery.fence)
                if task.delivery._row.suspect:
                    self._suspects.append((monotonic(), task))
                else:
                    self._ready.append(task)
            self._lock.notify_all()

    def put_back(self, tasks: list[Task]) -> None:
        """Return tasks of a slice that did not start, before all others; suspects stay aside."""
        with self._lock:
            for task in reversed(tasks):
                if task.delivery._row.suspect:
                    self._suspects.appendleft((monotonic(), task))
                else:
                    self._ready.appendleft(task)
            self._lock.notify_all()

    def take(self) -> Slice | None:
        """Wait for the next slice; None when the hand was closed. Each ends with `done()`."""
        with self._lock:
            while not self._closed:
                if self._alone:
                    pass
                elif self._suspects and not self._running:
                    self._alone = True
                    self._running += 1
                    return Slice([self._suspects.popleft()[1]], alone=True)
                elif self._ready and not self._suspect_is_due():
                    self._running += 1
                    self._taken_at = monotonic()
                    slice_ = self._next_slice()
                    if len(self._ready) < self._tell_below:
                        self._tell_below = -1
                        self._on_room()
                    return slice_
                self._free += 1
                if self._tell_when_free:
                    self._tell_when_free = False
                    self._on_room()
                self._lock.wait(1.0 if self._suspects else None)
                self._free -= 1
            return None

    def stuck(self) -> bool:
        """Say whether every executor has been busy with what it has for STUCK_AFTER seconds.

        If so, `on_room` is called when one becomes free.
        """
        with self._lock:
            stuck = not self._free and monotonic() - self._taken_at > STUCK_AFTER
            self._tell_when_free = stuck and bool(self._running)
            return self._tell_when_free

    def give_back(self) -> list[Task]:
        """Return everything that waits, to be released: others may have time for it."""
        with self._lock:
            waiting = [*self._ready, *(task for _, task in self._suspects)]
            self._ready.clear()
            self._suspects.clear()
            return waiting

    def done(self, slice_: Slice) -> None:
        """The tasks of this slice run no more."""
        with self._lock:
            self._running -= 1
            if slice_.alone:
                self._alone = False
            if self._alone or self._suspects or slice_.alone:
                self._lock.notify_all()
        if slice_.alone:
            self._on_room()  # async handlers may start again
        self._tell_if_idle()

    def enter(self) -> None:
        """Count something that runs here but was not taken here (an async handler)."""
        with self._lock:
            self._running += 1

    def leave(self) -> None:
        """The counterpart of `enter()`."""
        with self._lock:
            self._running -= 1
            if self._suspects:
                self._lock.notify_all()
        self._tell_if_idle()

    def hold(self, fences: Iterable[tuple[str, Fence]]) -> None:
        """Keep the leases of these (queue, fence) renewed, until they are settled."""
        with self._lock:
            self._fences.update((held[1].id, held) for held in fences)

    def settled(self, ids: Iterable[int]) -> None:
        """These are ours no more."""
        with self._lock:
            for id in ids:
                self._fences.pop(id, None)

    def close(self) -> list[Task]:
        """Let nothing start any more; return what did not start."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        return self.give_back()

    def tell_below(self, count: int) -> None:
        """Call `on_room` as soon as fewer than `count` tasks wait."""
        self._tell_below = count

    def waiting(self) -> int:
        """How many tasks wait to be taken."""
        return len(self._ready) + len(self._suspects)

    def fences(self) -> list[tuple[str, Fence]]:
        """Everything that is claimed and not yet settled: queues and fences."""
        with self._lock:
            return list(self._fences.values())

    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._lock:
            return not (self._fences or self._running or self._ready or self._suspects)

    def exclusive(self) -> bool:
        """Say whether a suspect runs, or waits for everything else to end."""
        return self._alone or bool(self._suspects)

    def pace(self, handler: Handler) -> Pace:
        """The pace of this handler in this process."""
        pace = self._paces.get(handler.name)
        if pace is None:
            pace = self._paces.setdefault(handler.name, Pace())
        return pace

    def _tell_if_idle(self) -> None:
        if not (self._running or self._fences):
            self._on_room()

    def _suspect_is_due(self) -> bool:
        return bool(self._suspects) and monotonic() - self._suspects[0][0] > SUSPECT_PATIENCE

    def _next_slice(self) -> Slice:
        ready = self._ready
        first = ready.popleft()
        slice_ = Slice([first])
        handler = first.handler
        batch = handler.batch
        limit = self._batch if batch else self.pace(handler).limit
        if not handler.atomic or limit == 1:
            return slice_
        taken = {handler: 1}
        limits = {handler: limit}
        tasks = slice_.tasks
        while ready and len(tasks) < self._most:
            handler = ready[0].handler
            if batch:
                if handler is not first.handler:
                    break
            elif handler.batch or not handler.atomic:
                break
            count = taken.get(handler, 0)
            most = limits.get(handler)
            if most is None:
                most = limits[handler] = self.pace(handler).limit
            if count >= most or most == 1:
                break  # one of which we know no better than that it may take long is alone
            taken[handler] = count + 1
            tasks.append(ready.popleft())
        return slice_
