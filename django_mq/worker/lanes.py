"""The lanes that a worker claims from, and the order in which it tries them.

A lane is one queue at one priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django_mq.policy.routing import Pattern
from django_mq.worker.watermarks import LaneName

#: Seconds for which a lane is still claimed from after a look last saw a message in it.
FORGET_LANE = 60.0


class Lanes:
    """The known lanes of the queues that match `patterns`; earlier patterns are preferred."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [Pattern(text) for text in patterns]
        self._fixed = [(text, 0) for text in patterns if "*" not in text and "#" not in text]
        self._seen_at: dict[LaneName, float] = {}
        self._turn = 0
        #: Every known lane, sorted.
        self.known: list[LaneName] = []

    def preference(self, queue: str) -> int | None:
        """Return the index of the first pattern that `queue` matches; None if it matches none."""
        for index, pattern in enumerate(self._patterns):
            if pattern.matches(queue):
                return index
        return None

    def update(self, lanes: Iterable[LaneName], now: float) -> None:
        """Add `lanes`, in which a look saw messages at `now`; forget those unseen for long."""
        self._seen_at.update(dict.fromkeys(lanes, now))
        self._seen_at = {lane: at for lane, at in self._seen_at.items() if now - at < FORGET_LANE}
        self.known = sorted({*self._fixed, *self._seen_at})

    def in_order(self) -> list[LaneName]:
        """Return the lanes by preference, then priority; equal lanes take turns in being first."""
        if len(self.known) < 2:
            return self.known
        self._turn += 1
        turn = self._turn % len(self.known)
        rotated = self.known[turn:] + self.known[:turn]
        return sorted(rotated, key=lambda lane: (self.preference(lane[0]), -lane[1]))
