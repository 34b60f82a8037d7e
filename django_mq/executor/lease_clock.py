"""The clock that measures the age of a worker's leases."""

from __future__ import annotations

import time

# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC runs while the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Return seconds of a clock that, like a lease, also runs while the machine sleeps."""
    return time.clock_gettime(_CLOCK)
