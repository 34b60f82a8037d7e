"""`async def` handlers: many at once on one loop, outside any transaction, under leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from django_mq.executor import replies as answers
from django_mq.executor import reports as reporting
from django_mq.executor.async_settler import AsyncSettler
from django_mq.executor.connections import Outage
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.leased_call import LeasedCall, leased_call, sort_started
from django_mq.executor.lingering import LINGER_SHARE, Lingering
from django_mq.executor.scoreboard import CallEntries
from django_mq.executor.shared_thread import SharedThread
from django_mq.executor.tasks import most_in_call
from django_mq.messages import current_delivery
from django_mq.policy.outcomes import TimedOut
from django_mq.signals import message_started, wanted

if TYPE_CHECKING:
    from django_mq.executor.local_queue import LocalQueue
    from django_mq.executor.scoreboard import Scoreboard
    from django_mq.executor.tasks import Task
    from django_mq.executor.watchdog import Link
    from django_mq.messages import ClaimedRow
    from django_mq.policy.backoff import RetryPolicy

logger = logging.getLogger("django_mq")

#: Seconds that a cancelled handler has to end before its process is killed.
GRACE = 5.0
#: Seconds that the end waits for the thread of blocking calls, to close its connections.
LAST = 1.0


class AsyncRunner(threading.Thread):
    """Runs async handlers, at most `slots` at once; an AsyncSettler settles them in batches."""

    def __init__(
        self,
        *,
        alias: str,
        local_queue: LocalQueue,
        scoreboard: Scoreboard,
        first_entry: int,
        slots: int,
        batch: int,
        lease: Callable[[str], float],
        shortest_lease: float,
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settled: Callable[[Sequence[Ended]], None],
        on_room: Callable[[], None],
        link: Link | None = None,
    ) -> None:
        super().__init__(name="mq-async", daemon=True)
        self._alias = alias
        self._local_queue = local_queue
        self._scoreboard = scoreboard
        self._lease = lease
        self._policy = policy
        self._on_room = on_room
        self._slots = slots
        self._free = list(range(first_entry, first_entry + slots))
        self._lock = threading.Lock()
        self._busy = 0
        self._batch = batch
        self._lingering = Lingering(batch=batch, longest=shortest_lease / LINGER_SHARE)
        self._timer: asyncio.TimerHandle | None = None
        #: The drain ran out of time and cancelled handlers.
        self.cut_off = False
        self._cancelling = False
        self._running: set[asyncio.Task[None]] = set()
        self._settler = AsyncSettler(
            alias=alias,
            lease=lease,
            outage=outage,
            policy=policy,
            shortest_lease=shortest_lease,
            settled=settled,
            link=link,
        )

    def start(self) -> None:
        # A loop has descriptors that only its end closes: none for a run without coroutines.
        self._loop = asyncio.new_event_loop()
        super().start()

    def room(self) -> int:
        """How many more handlers may start now."""
        with self._lock:
            return self._slots - self._busy

    def submit(self, tasks: list[Task]) -> None:
        """Start `tasks`, for which there is room. Called by the thread that claims."""
        with self._lock:
            self._busy += len(tasks)
        for _ in tasks:
            self._local_queue.enter()
        self._loop.call_soon_threadsafe(self._start, tasks)

    def end(self, seconds: float | None) -> None:
        """Wait up to `seconds` for running handlers, then cancel them. Callable from any thread."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._halt, seconds)

    def run(self) -> None:
        self._settler.start()
        asyncio.set_event_loop(self._loop)
        self._thread = SharedThread(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._settler.end()
            self._settler.join()
            self._loop.run_until_complete(self._thread.close(LAST))
            self._loop.close()

    # ---- on the loop

    def _start(self, tasks: list[Task]) -> None:
        for task in tasks:
            if most_in_call(task, self._batch) == 1:
                self._begin([task])
            elif full := self._lingering.add(task):
                self._begin(full)
        if self._lingering:
            self._start_due()

    def _start_due(self) -> None:
        """Begin the calls whose lists have waited long enough."""
        for together in self._lingering.take_due(monotonic()):
            self._begin(together)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lingering:
            wait = self._lingering.next_at() - monotonic()
            self._timer = self._loop.call_later(max(0.0, wait), self._start_due)

    def _begin(self, tasks: list[Task]) -> None:
        running = self._loop.create_task(self._run(tasks), context=copy_context())
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, tasks: list[Task]) -> None:
        places = [self._free.pop() for _ in tasks]
        fences = [task.delivery.fence for task in tasks]
        entries = CallEntries(self._scoreboard, places, fences)
        try:
            asked = [self._ask("start", task) for task in tasks]
            started = {fence.id: await each for fence, each in zip(fences, asked, strict=True)}
            barred, ready = sort_started(tasks, started)
            for each in barred:
                if each.settled is Settled.LOST:
                    reporting.lease_lost(each.delivery)
                    self._settler.settled([each])
                else:
                    await self._ask("settle", each)
            if ready:
                ended = await self._call(ready, entries)
                # Before the settle: if the process is ended now, these are not the cause.
                entries.end()
                for settled in [self._ask("settle", each) for each in ended]:
                    await settled
        except asyncio.CancelledError:
            return  # cancelled by the drain: it stays on the scoreboard, and the attempt counts
        except Exception:  # ours, not a handler's: the lease lapses
            logger.exception("async runner failed", extra={"event": "executor_failed"})
            self._settler.settled([Ended(task.delivery, Settled.LOST) for task in tasks])
            entries.end()
        finally:
            self._free += places
            with self._lock:
                self._busy -= len(tasks)
            for task in tasks:
                self._local_queue.leave(task.line)
            self._on_room()

    async def _call(self, tasks: list[Task], entries: CallEntries) -> list[Ended]:
        result: Any = None
        error: BaseException | None = None
        limit = asyncio.timeout(tasks[0].timeout)
        clock = _LimitClock(self._loop, limit, entries)
        lease = max(self._lease(task.delivery.queue) for task in tasks)
        call = leased_call(tasks, alias=self._alias, lease=lease, clock=clock)
        if wanted(message_started):
            for delivery in call.deliveries:
                reporting.started(delivery)
        clock.show(tasks[0].timeout)
        current_delivery.set(call.deliveries[0])
        began = perf_counter()
        try:
            async with limit:
                result = await _result(tasks[0].handler.call, call)
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and self._cancelling:
                raise  # cancelled by the drain, not by the handler itself
            late = isinstance(raised, TimeoutError) and limit.expired()
            error = TimedOut("the handler ran past its timeout") if late else raised
            if late:  # its call cannot be cancelled: the supervisor ends the process if it goes on
                await self._thread.left_by(call.deliveries[0])
        seconds = perf_counter() - began
        self._thread.tidy_up()
        return call.end(self._policy, result, error, seconds)

    def _ask(self, what: str, subject: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._settler.put(what, subject, self._loop, answer)
        return answer

    def _halt(self, seconds: float | None) -> None:
        self._loop.create_task(self._drain(seconds))

    async def _drain(self, seconds: float | None) -> None:
        for together in self._lingering.take_due(float("inf")):
            self._begin(together)
        if self._running:
            await asyncio.wait(set(self._running), timeout=seconds)
        self._cancelling = True
        for running in list(self._running):
            self.cut_off = True
            running.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=GRACE)
        self._loop.stop()


async def _result(function: Callable[[Any], Any], call: LeasedCall) -> Any:
    """Return the result of the call, encoded if it was asked for."""
    if not call.argument:
        return None  # nothing of the list can be read
    result = await function(call.argument)
    if any(each._row.wants_result for each in call.deliveries):
        result = answers.encoded(result, call.argument)
    return result


class _LimitClock:
    """Moves the timeout of a call on its loop, and the deadline its supervisor sees."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit: asyncio.Timeout, entries: CallEntries
    ) -> None:
        self._loop = loop
        self._limit = limit
        self._entries = entries
        self.answered = entries.answered

    def show(self, seconds: float) -> None:
        self._entries.show(monotonic() + seconds + GRACE)

    def extend(self, seconds: float) -> None:
        self.show(seconds)
        self._loop.call_soon_threadsafe(self._reschedule, seconds)

    def _reschedule(self, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._limit.reschedule(self._loop.time() + seconds)
