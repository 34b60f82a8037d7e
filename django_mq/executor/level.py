"""How many units of a capacity are in use: now, and on average over time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

#: The shortest time, in seconds, over which `Usage.mean()` averages.
MIN_PERIOD = 1.0


class Usage:
    """Counts the units in use. Thread-safe.

    >>> now = 0.0
    >>> usage = Usage(clock=lambda: now)
    >>> usage.add(2)
    >>> usage.count, usage.mean()
    (2, None)
    >>> now = 3.0
    >>> usage.add(-2)
    >>> now = 4.0
    >>> usage.mean()
    1.5
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._period_began = self._changed_at = clock()
        # The sum of units times seconds since the period began.
        self._unit_seconds = 0.0
        self._mean: float | None = None
        #: The units in use now.
        self.count = 0

    def add(self, units: int) -> None:
        """Use `units` more; fewer if negative."""
        with self._lock:
            self._sum_up(self._clock())
            self.count += units

    def mean(self) -> float | None:
        """Return the mean number of units in use since the last call; None if it is not known yet.

        Calls within MIN_PERIOD return the mean of the period before.
        """
        with self._lock:
            now = self._clock()
            if (seconds := now - self._period_began) >= MIN_PERIOD:
                self._sum_up(now)
                self._mean = self._unit_seconds / seconds
                self._period_began, self._unit_seconds = now, 0.0
            return self._mean

    def _sum_up(self, now: float) -> None:
        self._unit_seconds += self.count * (now - self._changed_at)
        self._changed_at = now
