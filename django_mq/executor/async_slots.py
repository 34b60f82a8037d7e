"""Slots of coroutines: how many calls may start now, and how many messages to claim."""

from __future__ import annotations

import threading
from collections.abc import Collection
from time import monotonic

from django_mq.messages import PlainFence

#: The messages claimed beyond the free slots should start within this many seconds: several times
#: what a claim takes.
AHEAD_SECONDS = 0.02
#: The most messages claimed beyond the free slots, as a share of all slots.
AHEAD_SHARE = 0.5
#: The weight of a call in the mean duration of calls.
WEIGHT = 1 / 16


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
    >>> slots.end([first], failed=False, seconds=9.0), slots.room()
    (None, 1)
    >>> slots.end([second], failed=True, seconds=9.0), slots.room()
    (None, 1)
    >>> slots.settle([first]), slots.settle([second]), slots.room()
    (False, True, 2)
    >>> slots.full_for()
    0.0
    """

    def __init__(self, count: int) -> None:
        #: The number of slots.
        self.count = count
        self._lock = threading.Lock()
        self._taken = 0
        self._unsettled = 0
        self._failed: set[PlainFence] = set()
        self._full_since: float | None = None
        self._mean_seconds: float | None = None

    def full_for(self) -> float:
        """Return for how many seconds all slots have been taken without a call ending."""
        since = self._full_since
        return 0.0 if since is None else monotonic() - since

    def room(self) -> int:
        """Return how many messages may start now."""
        with self._lock:
            return min(self.count - self._taken, 2 * self.count - self._unsettled)

    def to_claim(self, waiting: int) -> int:
        """Return how many messages to claim while `waiting` of them wait here; 0: none yet.

        Beyond the free slots, it is as many as end in AHEAD_SECONDS, so that no slot waits for a
        claim: by the mean duration of calls, slots end `count / mean` of them per second (Little's
        law). If calls are slow this is none, and siblings get the messages. While no slot is free,
        half of them are claimed at once.

        >>> slots = Slots(100)
        >>> slots.take(100)
        >>> slots.end([(1, 1, "me:1")], failed=False, seconds=0.05)
        >>> slots.to_claim(0), slots.to_claim(1), slots.to_claim(40), slots.to_claim(41)
        (41, 40, 1, 0)
        >>> slots.take(1)
        >>> slots.to_claim(0), slots.to_claim(20), slots.to_claim(21)
        (40, 20, 0)
        """
        free, ahead = self.room(), self._ahead()
        if free <= 0 and waiting > ahead // 2:
            return 0
        return max(0, free + ahead - waiting)

    def take(self, count: int) -> None:
        """Take slots for `count` messages."""
        with self._lock:
            self._taken += count
            self._unsettled += count
            self._full_since = monotonic() if self._taken >= self.count else None

    def give_back(self, count: int) -> None:
        """Free the slots of `count` messages that could not start."""
        with self._lock:
            self._taken -= count
            self._unsettled -= count
            self._full_since = None

    def claim_no_more(self) -> None:
        """Claim nothing beyond the free slots until the next call has ended."""
        self._mean_seconds = None

    def end(self, fences: Collection[PlainFence], *, failed: bool, seconds: float) -> None:
        """Note that the call of these messages ended after `seconds`; they are settled next."""
        with self._lock:
            self._full_since = None
            mean = seconds if self._mean_seconds is None else self._mean_seconds
            self._mean_seconds = mean + (seconds - mean) * WEIGHT
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

    def _ahead(self) -> int:
        mean = self._mean_seconds
        if mean is None:
            return 0
        return int(self.count * min(AHEAD_SHARE, AHEAD_SECONDS / max(mean, 1e-6)))
