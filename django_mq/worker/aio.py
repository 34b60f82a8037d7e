"""`async def` handlers: many at once on one loop, outside any transaction, under leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections

from django_mq.messages import current_delivery
from django_mq.outcomes import TimedOut
from django_mq.signals import message_started, wanted
from django_mq.store import leases
from django_mq.worker import answers, reporting
from django_mq.worker.database import LOST, Outage, Statements
from django_mq.worker.ending import Ended, Settled, ends_or_lost, settle_all
from django_mq.worker.leased import LeasedDelivery
from django_mq.worker.unbound import ended_unbound

if TYPE_CHECKING:
    from django_mq.backoff import RetryPolicy
    from django_mq.messages import ClaimedRow, Fence
    from django_mq.store import Cursor
    from django_mq.worker.board import Board
    from django_mq.worker.hand import Hand
    from django_mq.worker.tasks import Task

logger = logging.getLogger("django_mq")

#: Seconds that a cancelled handler has to end before its process is ended.
GRACE = 5.0


class AsyncRunner(threading.Thread):
    """Runs async handlers, at most `slots` at once; a second thread settles them in batches."""

    def __init__(
        self,
        *,
        alias: str,
        hand: Hand,
        board: Board,
        first_place: int,
        slots: int,
        lease: Callable[[str], float],
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settled: Callable[[Sequence[Ended]], None],
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(name="mq-async", daemon=True)
        self._alias = alias
        self._hand = hand
        self._board = board
        self._lease = lease
        self._policy = policy
        self._on_room = on_room
        self._slots = slots
        self._free = list(range(first_place, first_place + slots))
        self._lock = threading.Lock()
        self._busy = 0
        #: Whether the drain ran out of time for some of them.
        self.cut_off = False
        self._cancelling = False
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._settler = Settler(alias=alias, lease=lease, outage=outage, settled=settled)

    def room(self) -> int:
        """How many more handlers may start now."""
        with self._lock:
            return self._slots - self._busy

    def submit(self, tasks: list[Task]) -> None:
        """Start `tasks`, for which there is room: from the thread that claims."""
        with self._lock:
            self._busy += len(tasks)
        for _ in tasks:
            self._hand.enter()
        self._loop.call_soon_threadsafe(self._start, tasks)

    def end(self, seconds: float | None) -> None:
        """Let what runs end, for so many seconds at most; cancel the rest. From any thread."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._halt, seconds)

    def run(self) -> None:
        self._settler.start()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(sync_to_async(connections.close_all)())
        finally:
            self._settler.end()
            self._settler.join()
            self._loop.close()

    # ---- on the loop

    def _start(self, tasks: list[Task]) -> None:
        for task in tasks:
            running = self._loop.create_task(self._run(task), context=copy_context())
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, task: Task) -> None:
        place = self._free.pop()
        try:
            started = await self._ask("start", task)
            if started is None:
                reporting.lease_lost(task.delivery)
                self._settler.settled([Ended(task.delivery, Settled.LOST)])
            elif started:
                await self._ask("settle", Ended(task.delivery, Settled.BURIED, reason="expired"))
            else:
                await self._ask("settle", await self._call(task, place))
        except asyncio.CancelledError:
            return  # the drain ran out of time: it stays on the board, and is charged for that
        except Exception:  # ours, not a handler's: the lease lapses
            logger.exception("async runner failed", extra={"event": "executor_failed"})
            self._settler.settled([Ended(task.delivery, Settled.LOST)])
            self._board.clear(place)
        else:
            self._board.clear(place)
        finally:
            self._free.append(place)
            with self._lock:
                self._busy -= 1
            self._hand.leave(task.line)
            self._on_room()

    async def _call(self, task: Task, place: int) -> Ended:
        result: Any = None
        error: BaseException | None = None
        limit = asyncio.timeout(task.timeout)
        clock = _LimitClock(self._loop, limit, self._board, place, task)
        delivery = LeasedDelivery(
            task.delivery._row,
            alias=self._alias,
            lease=self._lease(task.delivery.queue),
            clock=clock,
        )
        if wanted(message_started):
            reporting.started(delivery)
        clock.show(task.timeout)
        current_delivery.set(delivery)
        began = perf_counter()
        try:
            async with limit:
                result = await task.handler.function(delivery)
                if delivery._row.wants_result:
                    result = answers.encoded(result, delivery)
        except BaseException as raised:
            if isinstance(raised, asyncio.CancelledError) and self._cancelling:
                raise  # the drain cancels it, and not the handler itself or what it awaited
            late = isinstance(raised, TimeoutError) and limit.expired()
            error = TimedOut("the handler ran past its timeout") if late else raised
        seconds = perf_counter() - began
        await sync_to_async(close_old_connections)()
        return ended_unbound(delivery, self._policy(task.delivery._row), result, error, seconds)

    async def _ask(self, what: str, subject: Any) -> Any:
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._settler.put(what, subject, self._loop, answer)
        return await answer

    def _halt(self, seconds: float | None) -> None:
        self._loop.create_task(self._drain(seconds))

    async def _drain(self, seconds: float | None) -> None:
        if self._running:
            await asyncio.wait(set(self._running), timeout=seconds)
        self._cancelling = True
        for running in list(self._running):
            self.cut_off = True
            running.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=GRACE)
        self._loop.stop()


class _LimitClock:
    """Moves the timeout of a handler on its loop, and the deadline its supervisor sees."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit: asyncio.Timeout,
        board: Board,
        place: int,
        task: Task,
    ) -> None:
        self._loop = loop
        self._limit = limit
        self._board = board
        self._place = place
        self._fence = task.delivery.fence

    def show(self, seconds: float) -> None:
        self._board.write(self._place, self._fence, monotonic() + seconds + GRACE, False)

    def extend(self, seconds: float) -> None:
        self.show(seconds)
        self._loop.call_soon_threadsafe(self._reschedule, seconds)

    def _reschedule(self, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._limit.reschedule(self._loop.time() + seconds)


class Settler(threading.Thread):
    """Starts and settles for the loop: whatever came together goes in one transaction."""

    def __init__(
        self,
        *,
        alias: str,
        lease: Callable[[str], float],
        outage: Outage,
        settled: Callable[[Sequence[Ended]], None],
    ) -> None:
        super().__init__(name="mq-settler", daemon=True)
        self._statements = Statements(alias)
        self._lease = lease
        self._outage = outage
        self.settled = settled
        self._asked: queue.SimpleQueue[tuple[str, Any, Any, Any] | None] = queue.SimpleQueue()

    def put(self, what: str, subject: Any, loop: asyncio.AbstractEventLoop, answer: Any) -> None:
        """Ask for `start` of a task or `settle` of an Ended; `answer` is resolved on `loop`."""
        self._asked.put((what, subject, loop, answer))

    def end(self) -> None:
        """End the thread when all that was asked is done."""
        self._asked.put(None)

    def run(self) -> None:
        ending = False
        try:
            while not ending:
                asked = [self._asked.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        asked.append(self._asked.get_nowait())
                ending = None in asked
                self._serve([each for each in asked if each is not None])
        finally:
            self._statements.close()

    def _serve(self, asked: list[tuple[str, Any, Any, Any]]) -> None:
        starts = [task for what, task, _, _ in asked if what == "start"]
        ends = [ended for what, ended, _, _ in asked if what == "settle"]
        started, lost = self._write(starts, ends)
        if ends:
            for ended in ends:
                if ended.delivery.id in lost:
                    reporting.lease_lost(ended.delivery)
            reporting.all_ended([each for each in ends if each.delivery.id not in lost])
            self.settled(ends_or_lost(ends, lost))
        for what, subject, loop, answer in asked:
            value = started.get(subject.delivery.id) if what == "start" else None
            loop.call_soon_threadsafe(_resolve, answer, value)

    def _start(self, cursor: Cursor, starts: list[Task]) -> dict[int, bool]:
        fences: dict[float, list[Fence]] = {}
        for task in starts:
            fences.setdefault(self._lease(task.delivery.queue), []).append(task.delivery.fence)
        started: dict[int, bool] = {}
        for lease, together in fences.items():
            started.update(leases.start(cursor, together, lease=lease))
        return started

    def _write(self, starts: list[Task], ends: list[Ended]) -> tuple[dict[int, bool], set[int]]:
        while True:
            try:
                cursor = self._statements.cursor()
                with self._statements.transaction():
                    lost = settle_all(cursor, ends) if ends else set()
                    started = self._start(cursor, starts)
                self._outage.over()
                return started, lost
            except Exception as error:  # the answers are waited for: never end without them
                self._statements.close()
                if not isinstance(error, LOST):
                    if len(ends) + len(starts) > 1:
                        return self._write_one_by_one(starts, ends)
                    reporting.refused(ends, error)
                    return {}, {ended.delivery.id for ended in ends}
                self._outage.wait(error)
                if self._outage.stopped():
                    return {}, {ended.delivery.id for ended in ends}

    def _write_one_by_one(
        self, starts: list[Task], ends: list[Ended]
    ) -> tuple[dict[int, bool], set[int]]:
        """The database refuses one of these; the others are not to suffer."""
        started: dict[int, bool] = {}
        lost: set[int] = set()
        for each in ends:
            lost |= self._write([], [each])[1]
        for task in starts:
            started |= self._write([task], [])[0]
        return started, lost


def _resolve(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
