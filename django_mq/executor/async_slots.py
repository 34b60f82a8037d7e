"""Slots of coroutines: how many calls may start now."""

from __future__ import annotations

import threading
from collections.abc import Collection
from time import monotonic

from django_mq.messages import PlainFence


class Slots:
    """Counts messages between start and settle. Thread-safe.

    A message that succeeded leaves its slot when its handler ends, before it is settled; but at
    most `count` such messages wait for their settle. A failed message keeps its slot until it is
    settled: only then is it known whether its queue backs off, so nothing may take its place
    earlier. Messages are named by their fences: one that is retried at once may end again before
    its first end is settled.

    >>> slots = Slots(2)
    >>> slots.take(2)
    >>> first, second = (1, 1, "me:1"), (2, 1, "me:1")
    >>> slots.end([first], failed=False), slots.room()
    (None, 1)
    >>> slots.end([second], failed=True), slots.room()
    (None, 1)
    >>> slots.settle([first]), slots.settle([second]), slots.room()
    (False, True, 2)
    >>> slots.full_for()
    0.0
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._taken = 0
        self._unsettled = 0
        self._failed: set[PlainFence] = set()
        self._full_since: float | None = None

    def full_for(self) -> float:
        """Return for how many seconds all slots have been taken without a call ending."""
        since = self._full_since
        return 0.0 if since is None else monotonic() - since

    def room(self) -> int:
        """Return how many messages may start now."""
        with self._lock:
            return min(self._count - self._taken, 2 * self._count - self._unsettled)

    def take(self, count: int) -> None:
        """Take slots for `count` messages."""
        with self._lock:
            self._taken += count
            self._unsettled += count
            self._full_since = monotonic() if self._taken >= self._count else None

    def end(self, fences: Collection[PlainFence], *, failed: bool) -> None:
        """Note that the call of these messages has ended; they are settled next."""
        with self._lock:
            self._full_since = None
            if failed:
                self._failed.update(fences)
            else:
                self._taken -= len(fences)

    def settle(self, fences: Collection[PlainFence]) -> bool:
        """Note that these messages are settled; return whether that freed any slots."""
        with self._lock:
            failed = self._failed.intersection(fences)
            self._failed -= failed
            self._taken -= len(failed)
            self._unsettled -= len(fences)
            return bool(failed)
