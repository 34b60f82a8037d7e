"""The one thing the loop sleeps on: a ring, room in hand, a due time, the poll interval."""

from __future__ import annotations

import threading
from time import monotonic


class Wakeup:
    """A sleep that can be poked. Pokes are kept until seen, and many are as good as one."""

    def __init__(self) -> None:
        #: How often it slept.
        self.sleeps = 0
        self._rung = False
        # Held while there was no poke. An Event has a lock for each sleeper, one for all of them
        # and a list between: three times as much for whoever pokes and for whoever sleeps.
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def poke(self) -> None:
        """End the sleep: there is something to do here (room in hand, the end of the work)."""
        try:
            self._quiet.release()
        except RuntimeError:
            return  # there was one already

    def ring(self) -> None:
        """End the sleep: somebody says that a message was committed."""
        self._rung = True
        self.poke()

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`, or as soon as there was a poke or a ring."""
        self.sleeps += 1
        self._quiet.acquire(timeout=max(0.0, seconds))

    def take_ring(self) -> bool:
        """Say whether it rang since the last call."""
        rung, self._rung = self._rung, False
        return rung


class Deadline:
    """A moment by this process's own clock; for waiting only, never for what is stored.

    >>> Deadline(None).passed(), Deadline(0).passed()
    (False, True)
    """

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else monotonic() + seconds

    def left(self) -> float | None:
        """Seconds until then, not below zero; None for never."""
        return None if self._at is None else max(0.0, self._at - monotonic())

    def passed(self) -> bool:
        return self._at is not None and monotonic() >= self._at
