"""`async def` handlers: many at once on one loop, outside any transaction, under leases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from django_mq.conf.error_logs import log_failure
from django_mq.executor import reports
from django_mq.executor.async_caller import AsyncCaller
from django_mq.executor.async_settler import AsyncSettler
from django_mq.executor.call_starts import CallStarts
from django_mq.executor.ended import ACKED, Ended, Settled
from django_mq.executor.local_queue import STUCK_AFTER, LocalQueue
from django_mq.executor.loop_end import LoopEnd
from django_mq.executor.loop_watch import LoopWatch
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard import Scoreboard
from django_mq.executor.scoreboard_entries import CallEntries
from django_mq.executor.tasks import Task, fences
from django_mq.executor.watchdog import Link
from django_mq.policy.stack import Frame, all_stacks, awaited_by, of_handler

#: Seconds over which freed slots are collected before they are announced, so that one claim fills
#: them all.
ROOM_EVERY = 0.0005

#: Runs one call, and returns how its messages ended.
CallTask = asyncio.Task[list[Ended]]


class AsyncRunner(threading.Thread):
    """Runs the coroutines that got a slot; an AsyncSettler settles them in batches."""

    def __init__(
        self,
        context: RunContext,
        *,
        local_queue: LocalQueue,
        scoreboard: Scoreboard,
        first_entry: int,
        batch: int,
        poke: Callable[[], None],
        link: Link,
    ) -> None:
        super().__init__(name="mq-async", daemon=True)
        self._context = context
        self._local_queue = local_queue
        self._scoreboard = scoreboard
        self._poke = poke
        self._slots = local_queue.slots
        self._indexes = range(first_entry, first_entry + self._slots.count)
        self._watch = LoopWatch(poke)
        #: Whether the drain ran out of time and cancelled handlers.
        self.cut_off = False
        self._drained = self._room_notice_due = False
        self._running: dict[CallTask, CallEntries] = {}
        self._settler = AsyncSettler(
            context, on_calls_settled=self._calls_settled, give_up=self._give_up, link=link
        )
        self._starts = CallStarts(
            context,
            scoreboard=scoreboard,
            indexes=self._indexes,
            batch=batch,
            settler=self._settler,
            is_superseded=local_queue.unsettled.is_superseded,
            create=self._create_call,
        )

    def start(self) -> None:
        # Created here, because a loop has file descriptors that are closed only when the thread
        # ends: a run without coroutines needs none.
        self._loop = asyncio.new_event_loop()
        super().start()

    def stuck(self) -> bool:
        """Return whether no call could start for a second: no slot came free, or `blocked()`."""
        return self._slots.full_for() > STUCK_AFTER or self.blocked()

    def submit(self, tasks: list[Task]) -> None:
        """Start `tasks`, which have slots. Called by the thread that claims."""
        self._starts.hand_over(tasks)
        self._watch.ask()
        self._loop.call_soon_threadsafe(self._start_handed)

    def blocked(self) -> bool:
        """Return whether a handler blocks the loop; the worker is poked once it moves again."""
        return self._watch.blocked()

    def watch(self) -> float:
        """Ask the loop whether it moves; report it if not. Returns the seconds to the next look."""
        if not (self.is_alive() and (self._running or self._starts.waiting)):
            return float("inf")  # a drain closes the loop, also if a call ignored its cancel
        if self._watch.is_to_be_asked():
            self._watch.ask()
            self._loop.call_soon_threadsafe(self._answer)
        if self.blocked() and (seconds := self._watch.is_to_be_reported()) is not None:
            self._report_blocked(seconds)
        return self._watch.look_in(starting=self._starts.waiting)

    def take_back(self) -> list[Task]:
        """Take back the tasks that have not begun; they keep their slots. From any thread."""
        return self._starts.take_back()

    def _report_blocked(self, seconds: float) -> None:
        """Report which call runs on the loop, if any, and where it is."""
        running: asyncio.Task[Any] | None = asyncio.current_task(self._loop)
        entries = self._running.get(running) if running else None
        unsettled = self._local_queue.unsettled.all() if entries else []
        delivery = next((each for each in unsettled if entries and entries.has(each.id)), None)
        reports.loop_blocked(delivery, of_handler(all_stacks().get(self.ident or 0, ())), seconds)

    def stop(self, id: int, by: str) -> bool:
        """Stop the call of message `id`, if it runs here. From any thread."""
        if (found := self._call_of(id)) is None:
            return False
        self._loop.call_soon_threadsafe(self._caller.stop, found[1], id, by)
        return True

    def where(self, id: int) -> list[Frame]:
        """Return where the call of message `id` waits; nothing if it does not. From any thread."""
        return awaited_by(found[0].get_coro()) if (found := self._call_of(id)) else []

    def _call_of(self, id: int) -> tuple[CallTask, CallEntries] | None:
        return next((each for each in list(self._running.items()) if each[1].has(id)), None)

    def end(self, seconds: float | None) -> None:
        """End within `seconds`; cancel handlers that run too long. Callable from any thread."""
        if self.is_alive():
            self._watch.ask()
            asyncio.run_coroutine_threadsafe(self._drain(LoopEnd(seconds)), self._loop)

    def run(self) -> None:
        self._scoreboard.bind_thread(*self._indexes)
        self._settler.start()
        asyncio.set_event_loop(self._loop)
        self._caller = AsyncCaller(self._context, self._loop)
        try:
            self._run_loop()
        finally:
            self._settler.end()
            self._settler.join()
            self._loop.run_until_complete(self._caller.close())
            self._loop.close()

    def _run_loop(self) -> None:
        """Run the loop until the drain is over, although handlers may stop it."""
        while not self._drained:
            try:
                self._loop.run_forever()
            except (KeyboardInterrupt, SystemExit) as error:  # asyncio lets these out of any task
                log_failure("loop_interrupted", error, "a task of an async handler ended the loop")

    # ---- on the loop

    def _answer(self) -> None:
        """Answer that the loop moves; if it did all the time, more slots may be used."""
        if self._watch.moved() and self._slots.widen():
            self._poke()

    def _start_handed(self) -> None:
        self._watch.moved()
        self._starts.start_handed()

    def _create_call(self, tasks: list[Task], entries: CallEntries) -> None:
        running = self._loop.create_task(self._run(tasks, entries))
        self._running[running] = entries
        running.add_done_callback(lambda task: self._end_call(task, tasks, entries))

    async def _run(self, tasks: list[Task], entries: CallEntries) -> list[Ended]:
        if not (ready := await self._starts.ready(tasks, entries)):
            return []
        ended = await self._caller.call(ready, entries)
        # Before the settle: if the process is ended now, these messages are not the cause.
        entries.end()
        return ended

    def _end_call(self, call: CallTask, tasks: list[Task], entries: CallEntries) -> None:
        """Settle an ended call; one that a handler cancelled may not even have begun."""
        del self._running[call]
        if not (entries.owned_by_loop or self._starts.begin(entries)):
            return  # the worker has taken its messages back
        cancelled = call.cancelled()
        error = asyncio.CancelledError("by another handler") if cancelled else call.exception()
        ended = call.result() if error is None else []
        # Cancelled by the drain it stays on the scoreboard, and the attempt counts.
        if error is not None and not (cancelled and self._caller.cancelling):
            log_failure("executor_failed", error, "async runner failed")
            was_called = entries.limit is not None or not cancelled
            settled = Settled.LOST if was_called else Settled.RELEASED
            ended = [Ended(task.delivery, settled) for task in tasks]
            entries.end()
        failed = any(each.settled is not ACKED for each in ended)
        seconds = monotonic() - entries.made_at
        self._slots.end(fences(tasks), failed=failed, seconds=seconds)
        self._local_queue.paces.of(tasks[0].handler).seconds = seconds
        self._starts.free(entries)
        self._settler.settle(ended, tasks)
        # Lists wait for the notice: more slots may be free then, and a list has more messages.
        if next_ := self._local_queue.coroutines.take(lists=False):
            self._starts.start(next_)
        if self._local_queue.coroutines.want_poke():
            self._notify_room()

    def _calls_settled(self, tasks: Sequence[Task]) -> None:
        """Note that the calls of `tasks` are settled. Called by the settler's thread."""
        came_free = self._slots.settle(fences(tasks))
        self._local_queue.coroutines_done(*[task.line for task in tasks])
        if came_free or self._local_queue.coroutines.want_poke():
            self._poke()

    def _give_up(self, ended: Sequence[Ended], tasks: Sequence[Task]) -> None:
        """Halt the lines of `tasks`, so that nothing behind them starts; let the leases lapse."""
        for task in tasks:
            if task.line is not None:
                self._local_queue.halt_line(task.line)
        self._local_queue.unsettled.remove([each.delivery.fence for each in ended])

    def _notify_room(self) -> None:
        """Announce free slots after a moment, in which more slots may become free."""
        if not self._room_notice_due:
            self._room_notice_due = True
            self._loop.call_later(ROOM_EVERY, self._notify_room_now)

    def _notify_room_now(self) -> None:
        self._room_notice_due = False
        self._poke()

    async def _drain(self, end: LoopEnd) -> None:
        self._watch.moved()
        self._starts.start_lingering()
        try:
            await end.wait_for_calls(self._running)
            self._caller.cancelling, self.cut_off = True, bool(self._running)
            await end.cancel_all(self._running)
        finally:
            self._drained = True
            self._loop.stop()
