"""A gauge: the current value of a count, and its mean over time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

#: The shortest time, in seconds, over which `Gauge.mean()` averages.
MIN_PERIOD = 1.0


class Gauge:
    """A count that rises and falls, and its mean over time. Thread-safe.

    >>> now = 0.0
    >>> gauge = Gauge(clock=lambda: now)
    >>> gauge.add(2)
    >>> gauge.count, gauge.mean()
    (2, None)
    >>> now = 3.0
    >>> gauge.add(-2)
    >>> now = 4.0
    >>> gauge.mean()
    1.5
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._period_began = self._changed_at = clock()
        # The sum of the count times the seconds that it lasted, since the period began.
        self._area = 0.0
        self._mean: float | None = None
        #: The count now.
        self.count = 0

    def add(self, number: int) -> None:
        """Add `number`, which may be negative, to the count."""
        with self._lock:
            self._sum_up(self._clock())
            self.count += number

    def mean(self) -> float | None:
        """Return the mean since the last call; None if it is not known yet.

        Calls within MIN_PERIOD return the mean of the period before.
        """
        with self._lock:
            now = self._clock()
            if (seconds := now - self._period_began) >= MIN_PERIOD:
                self._sum_up(now)
                self._mean = self._area / seconds
                self._period_began, self._area = now, 0.0
            return self._mean

    def _sum_up(self, now: float) -> None:
        self._area += self.count * (now - self._changed_at)
        self._changed_at = now
