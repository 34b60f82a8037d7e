"""Moments until which threads and event loops wait."""

from __future__ import annotations

from threading import TIMEOUT_MAX
from time import monotonic


class Deadline:
    """A moment by this process's clock: for waiting, never for stored times.

    `seconds` is the time from the start to the deadline; None means never.

    >>> Deadline(None).passed(), Deadline(0).passed()
    (False, True)
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at = None if seconds is None else monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the seconds left, from zero up to what a thread can wait; None for never."""
        return None if self._at is None else min(max(0.0, self._at - monotonic()), TIMEOUT_MAX)

    def passed(self) -> bool:
        return self._at is not None and monotonic() >= self._at
