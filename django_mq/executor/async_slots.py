"""Slots of coroutines: how many calls may start now, and how many messages to claim."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from time import monotonic

from django_mq.executor.gauge import Gauge
from django_mq.messages import PlainFence

#: The messages claimed beyond the free slots should start within this many seconds: several times
#: what a claim takes.
AHEAD_SECONDS = 0.02
#: The most messages claimed beyond the free slots, as a share of all slots.
AHEAD_SHARE = 0.5
#: The seconds in which ended calls are counted. If calls take longer on average, the gain is below
#: 5 %, and calls that began together would let others wait for as long as they take.
WINDOW = 0.1
#: The weight of a call in the mean duration of calls.
WEIGHT = 1 / 16


class Slots:
    """Counts messages between start and settle. Thread-safe.

    A message that succeeded leaves its slot when its handler ends, before it is settled; but at
    most `count` such messages wait for their settle. A failed message keeps its slot until it is
    settled: only then is it known whether its queue backs off, so nothing may take its place
    earlier. Messages are named by their fences: one that is retried at once may end again before
    its first end is settled.

    Slots are taken when coroutines leave the local queue.

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

    def __init__(self, count: int, *, clock: Callable[[], float] = monotonic) -> None:
        #: The number of slots.
        self.count = count
        # How many of them may be used: fewer after a handler has blocked the loop.
        self._usable = count
        self._clock = clock
        self._lock = threading.Lock()
        #: The slots that are taken.
        self.taken = Gauge(clock=clock)
        self._unsettled = 0
        self._failed: set[PlainFence] = set()
        self._full_since: float | None = None
        self._mean_seconds: float | None = None
        # When the last calls ended, once per message; no more than matter.
        self._ends: deque[float] = deque(maxlen=int(count * AHEAD_SHARE * WINDOW / AHEAD_SECONDS))

    def full_for(self) -> float:
        """Return for how many seconds all slots have been taken without a call ending."""
        since = self._full_since
        return 0.0 if since is None else self._clock() - since

    def room(self) -> int:
        """Return how many messages may start now; negative if more run than slots may be used."""
        with self._lock:
            return min(self._usable - self.taken.count, 2 * self.count - self._unsettled)

    def to_claim(self, waiting: int, *, ahead: bool = True) -> int:
        """Return how many messages to claim while `waiting` of them wait here; 0: none yet.

        These are as many as there are free slots; and `ahead` of them as many as will end in
        AHEAD_SECONDS, at the rate of the last calls, so that no slot waits for a claim. While no
        slot is free, half of them are claimed at once. If others wait, they are claimed ahead in
        any case: a claim that waited for a free slot would never get one.

        >>> slots = Slots(20, clock=lambda: 0.0)
        >>> slots.take(20)
        >>> slots.end([(n, 1, "me:1") for n in range(20)], failed=False, seconds=0.05)
        >>> slots.to_claim(0), slots.to_claim(0, ahead=False), slots.to_claim(1, ahead=False)
        (24, 20, 23)
        >>> slots.take(20)
        >>> slots.to_claim(0), slots.to_claim(2), slots.to_claim(3)
        (4, 2, 0)
        """
        free = self.room()
        more = self._ahead() if ahead or waiting else 0
        if free <= 0 and waiting > more // 2:
            return 0
        return max(0, free + more - waiting)

    def take(self, count: int) -> None:
        """Take slots for `count` messages, at least one."""
        with self._lock:
            self.taken.add(count)
            self._unsettled += count
            self._full_since = self._clock() if self.taken.count >= self._usable else None

    def reset(self) -> None:
        """Use no more slots than are taken, because a handler blocks the loop; more as calls end.

        If all handlers block it, each message that runs would else cause as many claims and
        releases as there are slots.
        """
        with self._lock:
            self._usable = min(max(self.taken.count, 1), self.count)

    def widen(self) -> bool:
        """Use twice as many slots; return whether there are more to use."""
        with self._lock:
            if self._usable == self.count:
                return False
            self._usable = min(2 * self._usable, self.count)
            self._full_since = None
            return True

    def give_back(self, count: int) -> None:
        """Free the slots of `count` messages that could not start."""
        with self._lock:
            self.taken.add(-count)
            self._unsettled -= count
            self._full_since = None

    def end(self, fences: Collection[PlainFence], *, failed: bool, seconds: float) -> None:
        """Note that the call of these messages ended after `seconds`; they are settled next."""
        with self._lock:
            self._full_since = None
            mean = seconds if self._mean_seconds is None else self._mean_seconds
            self._mean_seconds = mean + (seconds - mean) * WEIGHT
            self._ends.extend([self._clock()] * len(fences))
            if self._usable < self.count:
                self._usable = min(self._usable + len(fences), self.count)
            if failed:
                self._failed.update(fences)
            else:
                self.taken.add(-len(fences))

    def settle(self, fences: Collection[PlainFence]) -> bool:
        """Note that these messages are settled; return whether that freed any slots."""
        with self._lock:
            failed = self._failed.intersection(fences)
            self._failed -= failed
            if failed:
                self.taken.add(-len(failed))
            self._unsettled -= len(fences)
            return bool(failed)

    def _ahead(self) -> int:
        """Return how many messages to claim beyond the free slots."""
        since = self._clock() - WINDOW
        with self._lock:
            if self._mean_seconds is None or self._mean_seconds > WINDOW:
                return 0
            while self._ends and self._ends[0] < since:
                self._ends.popleft()
            return int(len(self._ends) * AHEAD_SECONDS / WINDOW)
