"""How many messages of a handler a slice may have: a slow start, and a fast retreat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """How many messages of one handler a slice may have: doubles while it keeps the time.

    After a conflict (deadlock, serialization) it is one, and for a while does not grow.
    """

    limit: int = 1
    patience: int = 0
    still: int = 0

    def kept_time(self, ran: int, most: int) -> None:
        """A slice with `ran` messages of this handler ended in time."""
        if self.still > 0:
            self.still -= ran
        elif ran >= self.limit:
            self.limit = min(self.limit * 2, most)

    def overran(self) -> None:
        """A slice did not end in time."""
        self.limit = max(1, self.limit // 2)

    def conflict(self) -> None:
        """Messages of this handler stood in each other's way: run them one by one for long."""
        self.limit = 1
        self.patience = min(max(500, self.patience * 4), 100_000)
        self.still = self.patience
