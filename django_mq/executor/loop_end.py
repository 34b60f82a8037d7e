"""The end of the loop of async handlers: everything on it may clean up, as in `asyncio.run()`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Any

from django_mq.executor import reports
from django_mq.executor.call_timeout import CANCEL_SECONDS
from django_mq.executor.deadline import Deadline

#: Handlers are cancelled before a drain is over, so that they can clean up: by this share of the
#: drain's time, and by at most this many seconds.
CLEANUP_SHARE, MAX_CLEANUP_SECONDS = 0.25, 2.0
#: Seconds for cleanup even if the drain has none left: the thread is waited for a little longer.
MIN_SECONDS = 0.3


class LoopEnd:
    """Ends what runs on the loop, within the `seconds` that a drain has left; None: no limit.

    Handlers have half of the time for cleanup alone, so that one that ignores its cancel leaves the
    rest to the tasks and generators of the others.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = Deadline(None if seconds is None else max(seconds, MIN_SECONDS))
        self._cleanup = min(CLEANUP_SHARE * (seconds or 0.0), MAX_CLEANUP_SECONDS)

    async def wait_for_calls(self, running: Collection[asyncio.Task[Any]]) -> None:
        """Wait until no call is `running`, or there is only time for their cleanup."""
        await _wait_for(running, self._until(self._cleanup))

    async def cancel_all(self, running: Collection[asyncio.Task[Any]]) -> None:
        """Cancel the calls that are `running`, then the tasks and generators left by handlers."""
        for task in list(running):
            task.cancel()
        await _wait_for(running, self._cancelled_until(self._cleanup / 2))
        left = asyncio.all_tasks() - {asyncio.current_task(), *running}
        if left:
            reports.tasks_left(left)
        for task in left:
            task.cancel()
        await self._wait_for_rest({*left, *running}, self._cleanup / 4)
        loop = asyncio.get_running_loop()
        await self._wait_for_rest({loop.create_task(loop.shutdown_asyncgens())}, 0.0)

    async def _wait_for_rest(self, tasks: set[asyncio.Task[Any]], before_end: float) -> None:
        for task in tasks.copy():
            task.add_done_callback(tasks.discard)
        await _wait_for(tasks, self._cancelled_until(before_end))

    def _until(self, before_end: float) -> float | None:
        """Return the seconds until `before_end` seconds before the end; None for never."""
        left = self._end.remaining()
        return None if left is None else max(0.0, left - before_end)

    def _cancelled_until(self, before_end: float) -> float:
        """Return the same, but not more than a cancelled handler may take anywhere else."""
        left = self._until(before_end)
        return CANCEL_SECONDS if left is None else min(left, CANCEL_SECONDS)


async def _wait_for(running: Collection[asyncio.Task[Any]], seconds: float | None) -> None:
    """Wait until none is `running`, at most `seconds`; they leave that collection as they end.

    A handler may cancel every task of the loop, also the one that waits here.
    """
    deadline = Deadline(seconds)
    while running:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(set(running), timeout=deadline.remaining())
        if deadline.passed():
            return
