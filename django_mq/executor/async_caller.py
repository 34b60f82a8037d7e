"""Call an async handler on the loop, under its timeout."""

from __future__ import annotations

import asyncio
import contextlib
from time import perf_counter
from typing import Any

from django_mq.executor import reports
from django_mq.executor.call_timeout import LoopTimeout, own_cancel
from django_mq.executor.ended import Ended
from django_mq.executor.leased_call import leased_call, result_of
from django_mq.executor.other_threads import OtherThreads
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard_entries import CallEntries
from django_mq.executor.shared_thread import SharedThread
from django_mq.executor.tasks import Task
from django_mq.executor.time_limits import time_limit
from django_mq.messages import set_current
from django_mq.policy.outcomes import AttemptEnded, cut_short
from django_mq.policy.stack import raised_from
from django_mq.signals import is_observed, message_started

#: At the end, seconds to wait for the thread of blocking calls to close its connections.
CLOSE_SECONDS = 1.0


class AsyncCaller:
    """Calls handlers on `loop`, and notes how their messages ended."""

    def __init__(self, context: RunContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._thread = SharedThread(loop)
        self._others = OtherThreads(loop)
        # The operator who stopped a message, by its id.
        self._stopped: dict[int, str] = {}
        #: Whether the drain ran out of time, and cancels calls.
        self.cancelling = False

    async def call(self, tasks: list[Task], entries: CallEntries) -> list[Ended]:
        """Call the handler of `tasks`, which share a call; return how their messages ended.

        Raises CancelledError if the drain has cancelled the call.
        """
        result: Any = None
        error: BaseException | None = None
        limit = entries.limit = asyncio.timeout(tasks[0].timeout)
        timeout = LoopTimeout(self._loop, limit, entries)
        lease = max(self._context.lease_of(task.delivery.queue) for task in tasks)
        call = leased_call(tasks, alias=self._context.alias, lease=lease, timeout=timeout)
        if is_observed(message_started):
            for delivery in call.deliveries:
                await reports.started_on_loop(delivery)
        timeout.show(tasks[0].timeout)
        set_current(call.deliveries[0], self._context.alias)
        began = perf_counter()
        try:
            async with limit:
                result = await result_of(tasks[0].handler.call, call)
            if limit.expired():  # it caught the cancel
                raise TimeoutError
        except BaseException as raised:
            kind = type(raised)  # not isinstance(), which reads the error's own `__class__`
            if issubclass(kind, asyncio.CancelledError | GeneratorExit) and self.cancelling:
                raise  # ended by the drain, not by the handler itself
            late = issubclass(kind, TimeoutError) and limit.expired()
            error = self._late_error(tasks, raised, perf_counter() - began) if late else raised
            if late:  # its blocking call goes on: the supervisor ends the process if that lasts
                await self._thread.wait_for_calls(call.deliveries[0])
                await self._others.wait_for_calls(call.deliveries[0], entries)
        error = await own_cancel() or error
        seconds = perf_counter() - began
        if self._stopped:
            for task in tasks:
                self._stopped.pop(task.delivery.id, None)
        self._thread.end_handler(call.deliveries[0])
        return call.end(self._context.failure_end, result, error, seconds)

    def stop(self, entries: CallEntries, id: int, by: str) -> None:
        """Cancel the call of message `id`, as operator `by` asked, unless it has just ended."""
        with contextlib.suppress(RuntimeError):  # it has just ended
            if entries.limit is not None:
                entries.limit.reschedule(self._loop.time())
                self._stopped[id] = by

    async def close(self) -> None:
        """Wait a moment for the thread of blocking calls to close its connections."""
        await self._thread.close(CLOSE_SECONDS)

    def _late_error(self, tasks: list[Task], raised: BaseException, seconds: float) -> AttemptEnded:
        """Return the error of a call cancelled by its limit, with the place where it waited."""
        stopped = (self._stopped[id] for task in tasks if (id := task.delivery.id) in self._stopped)
        limit = time_limit(tasks[0].handler, tasks[0].timeout)
        error = cut_short(next(stopped, None), seconds, limit)
        error.stack = raised_from(raised.__cause__ or raised)
        return error
