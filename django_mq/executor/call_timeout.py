"""The timeout of a call outside any transaction, and the deadline that its supervisor sees."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import Protocol

from django_mq.executor.scoreboard_entries import CallEntries

#: Seconds in which a cancelled handler must end before its process is killed.
CANCEL_SECONDS = 5.0


class Timeout(Protocol):
    """Ends the handler at its timeout; `extend()` moves the timeout."""

    def extend(self, seconds: float) -> None: ...


class CallTimeout(Timeout, Protocol):
    """The timeout of a call, which also learns of each message that has its verdict."""

    def judged(self, id: int) -> None: ...


class EntryTimeout:
    """The deadline of a call on the scoreboard, as the supervisor sees it."""

    def __init__(self, entries: CallEntries) -> None:
        self._entries = entries
        self.judged = entries.judged
        self.end = entries.end

    def extend(self, seconds: float) -> None:
        self._entries.show(monotonic() + seconds)


class LoopTimeout:
    """Moves the timeout of a call on its loop, and the deadline that its supervisor sees."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit: asyncio.Timeout, entries: CallEntries
    ) -> None:
        self._loop = loop
        self._limit = limit
        self._entries = entries
        self.judged = entries.judged

    def show(self, seconds: float) -> None:
        self._entries.show(monotonic() + seconds + CANCEL_SECONDS)

    def extend(self, seconds: float) -> None:
        self.show(seconds)
        self._loop.call_soon_threadsafe(self._reschedule, seconds)

    def _reschedule(self, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._limit.reschedule(self._loop.time() + seconds)


async def own_cancel() -> asyncio.CancelledError | None:
    """Return the cancel of this task that asyncio has yet to raise, if there is one.

    There is one if a handler has cancelled its own task and ended without waiting. At the end of
    the task, asyncio would discard the outcome of the call for it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            return error
    return None
