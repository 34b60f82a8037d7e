"""Entries of the scoreboard: executors and calls write one for each message that they run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from django_mq.executor.scoreboard import Scoreboard
from django_mq.messages import Fence, PlainFence

if TYPE_CHECKING:
    import asyncio


class ExecutorEntries:
    """The entries of one executor: `count` from `first` on, one per message of a batch."""

    def __init__(self, scoreboard: Scoreboard, first: int, count: int) -> None:
        self._scoreboard = scoreboard
        self._first = first
        self._count = count

    def bind_thread(self) -> None:
        """Note that this thread runs the messages of these entries."""
        self._scoreboard.bind_thread(self._first)

    def start(self, fences: Sequence[Fence], deadline: float, began: float) -> None:
        """Enter the messages of a batch in a transaction."""
        for offset, fence in enumerate(fences[: self._count]):
            self._scoreboard.write(self._first + offset, fence, deadline, True, began)

    def of_call(self, fences: Sequence[Fence]) -> CallEntries:
        """Return the entries of one call outside any transaction, not yet written."""
        first = self._first
        return CallEntries(self._scoreboard, range(first, first + self._count), fences)

    def start_one(self, fence: PlainFence, deadline: float, began: float) -> None:
        """Enter one message in a transaction."""
        self._scoreboard.write(self._first, fence, deadline, True, began)

    def set_deadline(self, deadline: float, count: int) -> None:
        """Change the deadline of the `count` entries that were made last."""
        for offset in range(min(count, self._count)):
            self._scoreboard.set_deadline(self._first + offset, deadline)

    def end(self, count: int) -> None:
        """Clear the `count` entries that were made last."""
        if count == 1:
            self._scoreboard.clear(self._first)
            return
        for offset in range(min(count, self._count)):
            self._scoreboard.clear(self._first + offset)


class CallEntries:
    """The entries of the messages of one call outside any transaction. Thread-safe.

    If the process dies, the messages with an entry are charged. The entry of a message that has its
    verdict is cleared unless it is the last one: a call that always kills its process must also run
    out of attempts.
    """

    def __init__(
        self, scoreboard: Scoreboard, indexes: Sequence[int], fences: Sequence[Fence]
    ) -> None:
        #: The places of the entries, and when they were chosen, on the clock of `monotonic()`.
        self.indexes, self.made_at = indexes, monotonic()
        self._scoreboard = scoreboard
        self._entries = {fence.id: (at, fence) for at, fence in zip(indexes, fences, strict=False)}
        self._lock = threading.Lock()
        self._began = 0.0
        #: Whether the messages are no longer taken back: the handler is about to be called.
        self.owned_by_loop = False
        #: The timeout that cancels the call, once its handler is about to be called.
        self.limit: asyncio.Timeout | None = None

    def has(self, id: int) -> bool:
        """Return whether message `id` runs in the call."""
        return id in self._entries

    def show(self, deadline: float) -> None:
        """Enter the messages, which run until `deadline`."""
        with self._lock:
            self._began = self._began or monotonic()
            for at, fence in self._entries.values():
                self._scoreboard.write(at, fence, deadline, False, self._began)

    def bind_thread(self, thread: int) -> None:
        """Note that `thread` is where the call is, the loop's or that of a call that it made.

        Only for calls of a loop, whose entries all have such a note.
        """
        self._scoreboard.bind_thread(*self.indexes, thread=thread)

    def judged(self, id: int) -> None:
        """Clear the entry of a message that has its verdict, unless it is the only one."""
        with self._lock:
            if id in self._entries and len(self._entries) > 1:
                self._scoreboard.clear(self._entries.pop(id)[0])

    def end(self) -> None:
        """Clear the entries: the call has ended."""
        with self._lock:
            for at, _ in self._entries.values():
                self._scoreboard.clear(at)
            self._entries.clear()
