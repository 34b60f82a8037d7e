"""How many messages this run has claimed, and how many more it may claim."""

from __future__ import annotations

from django_mq.executor.scoreboard import Scoreboard


class Quota:
    """Counts claimed messages, up to `limit` (None: no limit); used by the thread that claims."""

    def __init__(self, limit: int | None, scoreboard: Scoreboard) -> None:
        self._scoreboard = scoreboard
        #: How many more messages may be claimed; None: no limit.
        self.remaining = limit
        #: Messages ever claimed, including those released since.
        self.claimed = 0

    def claim(self, count: int) -> None:
        """Add `count` claimed messages."""
        self._scoreboard.add_claimed(count)
        self.claimed += count
        if self.remaining is not None:
            self.remaining = max(0, self.remaining - count)

    def release(self, count: int) -> None:
        """Allow `count` released messages to be claimed again."""
        self._scoreboard.add_claimed(-count)
        if self.remaining is not None:
            self.remaining += count
