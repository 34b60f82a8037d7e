"""What this process has in hand: claimed, not yet settled. Executors take slices from it.

Of one line (an order key, an ordered queue) only one slice, or one coroutine, is out at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING

from django_mq.worker.pace import Pace
from django_mq.worker.shut import Shut
from django_mq.worker.tasks import Line, Slice, Task, is_coroutine
from django_mq.worker.waiting import Lines

if TYPE_CHECKING:
    from django_mq.handlers import Handler
    from django_mq.messages import Delivery, Fence

#: Seconds that a suspect waits for a moment in which nothing else runs; then nothing else starts.
SUSPECT_PATIENCE = 10.0
#: Seconds without a new slice after which what is in hand is given back.
STUCK_AFTER = 1.0


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
        self._held: dict[int, Delivery] = {}
        self._lines = Lines()
        #: Queues of which nothing is to start.
        self.shut_queues = Shut()
        self._given_back: list[Task] = []

    def put(self, tasks: Iterable[Task]) -> None:
        """Add claimed tasks, behind what is there; suspects go aside."""
        with self._lock:
            wary = self._lines.broken or self.shut_queues
            for task in tasks:
                if wary and self.is_unwanted(task):
                    self._given_back.append(task)
                elif task.delivery._row.suspect and task.line is None:
                    self._suspects.append((monotonic(), task))
                else:
                    self._ready.append(task)
            self._lock.notify_all()

    def put_back(self, tasks: list[Task]) -> None:
        """Return tasks of a slice that did not start, before all others; suspects stay aside."""
        with self._lock:
            for task in reversed(tasks):
                if self.is_unwanted(task):
                    self._given_back.append(task)
                elif task.delivery._row.suspect and task.line is None:
                    self._suspects.appendleft((monotonic(), task))
                elif task.line is not None and self._lines.is_out(task.line):
                    self._lines.wait_first(task, task.line)  # until the slice it comes from is done
                else:
                    self._ready.appendleft(task)
            if self._given_back:
                self._on_room()
            self._lock.notify_all()

    def take(self) -> Slice | None:
        """Wait for the next slice; None when the hand was closed. Each ends with `done()`."""
        with self._lock:
            while not self._closed:
                self._step_aside()
                if self._alone:
                    pass
                elif self._suspects and not self._running:
                    self._alone = True
                    self._running += 1
                    suspect = self._suspects.popleft()[1]
                    lines = {suspect.line} if suspect.line is not None else set()
                    return Slice([suspect], alone=True, lines=lines)
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
            # The next of their lines, of which nothing runs yet.
            next_ = [task for _, task in self._suspects] + self._lines.take_coroutines()
            waiting = [*self._given_back, *self._ready, *next_, *self._lines.take_waiting()]
            self._given_back.clear()
            self._ready.clear()
            self._suspects.clear()
            for task in next_:
                self._free_line(task.line)
            return waiting

    def take_given_back(self) -> list[Task]:
        """Return what must not run here any more, to be released."""
        with self._lock:
            given_back, self._given_back = self._given_back, []
            return given_back

    def break_line(self, line: Line) -> None:
        """What ran of this line was not acked: what waits behind it here is given back."""
        with self._lock:
            self._lines.breaks(line)
            self._drop(lambda task: task.line == line)

    def is_unwanted(self, task: Task) -> bool:
        """Say whether `task` must not start: its line is broken, or its queue shut."""
        shut = self.shut_queues
        return task.line in self._lines.broken or (bool(shut) and shut.has(task.delivery))

    def shut(self, queue: str, before: datetime | None = None) -> None:
        """Let nothing of `queue` start that was claimed before then (None: nothing at all).

        What waits of it is given back. The next call for the queue goes before this one.
        """
        with self._lock:
            self.shut_queues.queue(queue, before)
            self._drop(lambda task: self.shut_queues.has(task.delivery))

    def drop(self, queues: Collection[str], *, keeping: Collection[str]) -> None:
        """Give back what waits of `queues`, except what the claims `keeping` took."""
        with self._lock:
            self._drop(
                lambda task: (
                    task.delivery.queue in queues and task.delivery.fence.claimed_by not in keeping
                )
            )

    def admit(self, task: Task) -> bool:
        """Say whether a coroutine may start now; else it waits here, or is given back."""
        with self._lock:
            if self.is_unwanted(task):
                self._given_back.append(task)
                return False
            if task.line is None:
                return True
            if any(waiting.line == task.line for waiting in self._ready):
                self._ready.append(task)  # behind one that is no coroutine
                self._lock.notify_all()
            elif self._lines.is_out(task.line):
                self._lines.wait(task, task.line)
            else:
                self._lines.occupy(task.line)
                return True
            return False

    def take_coroutines(self) -> list[Task]:
        """Return coroutines that waited for their line and may start now: none beside a suspect."""
        with self._lock:
            return [] if self._alone else self._lines.take_coroutines()

    def coroutines(self) -> int:
        """How many coroutines wait for their line: each will need a slot."""
        with self._lock:
            ready = sum(task.line is not None and is_coroutine(task) for task in self._ready)
            return ready + self._lines.count_coroutines()

    def done(self, slice_: Slice) -> None:
        """The tasks of this slice run no more."""
        with self._lock:
            self._running -= 1
            if slice_.alone:
                self._alone = False
            for line in slice_.lines:
                self._free_line(line)
            if self._alone or self._suspects or slice_.alone or slice_.lines:
                self._lock.notify_all()
        if slice_.alone:
            self._on_room()  # async handlers may start again
        self._tell_if_idle()

    def enter(self) -> None:
        """Count something that runs here but was not taken here (an async handler)."""
        with self._lock:
            self._running += 1

    def leave(self, line: Line | None) -> None:
        """The counterpart of `enter()`; `line`: of what ended."""
        with self._lock:
            self._running -= 1
            self._free_line(line)
            if self._suspects or line is not None:
                self._lock.notify_all()
        self._tell_if_idle()

    def hold(self, deliveries: Iterable[Delivery]) -> None:
        """Keep the leases of these renewed, until they are settled."""
        with self._lock:
            self._held.update([(delivery._row.id, delivery) for delivery in deliveries])

    def settled(self, ids: Iterable[int]) -> None:
        """These are ours no more."""
        with self._lock:
            for id in ids:
                self._held.pop(id, None)

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
        return len(self._ready) + len(self._suspects) + self._lines.waiting

    def fences(self) -> list[tuple[str, Fence]]:
        """Everything that is claimed and not yet settled: queues and fences."""
        with self._lock:
            held = list(self._held.values())
        return [(delivery.queue, delivery.fence) for delivery in held]

    def holds(self, queue: str) -> bool:
        """Say whether anything of `queue` is claimed here and not yet settled."""
        with self._lock:
            return any(delivery.queue == queue for delivery in self._held.values())

    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._lock:
            return not (self._held or self._running or self._ready or self._suspects)

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
        if not (self._running or self._held):
            self._on_room()

    def _suspect_is_due(self) -> bool:
        return bool(self._suspects) and monotonic() - self._suspects[0][0] > SUSPECT_PATIENCE

    def _drop(self, unwanted: Callable[[Task], bool]) -> None:
        """Give back the waiting tasks that are `unwanted`."""
        dropped = [task for task in self._ready if unwanted(task)]
        if dropped:
            self._ready = deque(task for task in self._ready if not unwanted(task))
        for task in self._lines.drop(unwanted):
            dropped.append(task)
        next_ = [task for _, task in self._suspects if unwanted(task)]
        if next_:
            self._suspects = deque(entry for entry in self._suspects if not unwanted(entry[1]))
        next_ += self._lines.drop_coroutines(unwanted)
        for task in next_:
            self._free_line(task.line)
        dropped += next_
        if dropped:
            self._given_back += dropped
            self._on_room()

    def _free_line(self, line: Line | None) -> None:
        """What ran of `line` is done: what waited for it comes first."""
        if line is None:
            return
        for task in reversed(self._lines.free(line)):
            self._ready.appendleft(task)
        if self._lines.coroutines:
            self._on_room()

    def _step_aside(self) -> None:
        """What cannot start now is taken out of the way of what can.

        What waits for its line; and a suspect or a coroutine whose turn it is in its line, before
        the rest of it.
        """
        ready = self._ready
        while ready and (line := ready[0].line) is not None:
            if self._lines.is_out(line):
                self._lines.wait(ready.popleft(), line)
            elif ready[0].delivery._row.suspect:
                self._lines.occupy(line)
                self._suspects.append((monotonic(), ready.popleft()))
            elif is_coroutine(ready[0]):
                self._lines.go_on(ready.popleft(), line)
                self._on_room()
            else:
                break

    def _next_slice(self) -> Slice:
        ready = self._ready
        first = ready.popleft()
        slice_ = Slice([first])
        if first.line is not None:
            self._lines.occupy(first.line)
            slice_.lines.add(first.line)
        handler = first.handler
        batch = handler.batch
        limit = self._batch if batch else self.pace(handler).limit
        if not handler.atomic or limit == 1:
            return slice_
        taken = {handler: 1}
        limits = {handler: limit}
        tasks = slice_.tasks
        while ready and len(tasks) < self._most:
            line = ready[0].line
            if line is not None:
                if line not in slice_.lines and self._lines.is_out(line):
                    self._lines.wait(ready.popleft(), line)
                    continue
                if ready[0].delivery._row.suspect:
                    break
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
            if line is not None:
                self._lines.occupy(line)
                slice_.lines.add(line)
        return slice_
