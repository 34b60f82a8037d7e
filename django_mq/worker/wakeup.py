"""The sleep of the loop, which ends on a ring, room in the local queue, a due time or the poll."""

from __future__ import annotations

import threading


class Wakeup:
    """A sleep that can be poked. A poke is kept until the next sleep; several count as one."""

    def __init__(self) -> None:
        #: How often it slept.
        self.sleeps = 0
        self._rung = False
        # Held unless there was a poke. An Event has one lock per sleeper, another for all of them,
        # and a list: three times the work, both to poke and to sleep.
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def poke(self) -> None:
        """End the sleep: there is something to do in this process (room, a stop)."""
        try:
            self._quiet.release()
        except RuntimeError:
            return  # already poked

    def ring(self) -> None:
        """End the sleep: a producer announced a committed message."""
        self._rung = True
        self.poke()

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`, or at the first poke or ring."""
        self.sleeps += 1
        self._quiet.acquire(timeout=max(0.0, seconds))

    def take_ring(self) -> bool:
        """Return whether `ring()` was called since the last call."""
        rung, self._rung = self._rung, False
        return rung
