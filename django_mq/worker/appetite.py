"""How much to hold in hand: enough that executors never wait, not so much that others starve."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

#: What is in hand should last between these seconds: shorter doubles the appetite, longer halves.
SHORT, LONG = 0.25, 1.0
#: Shorter than this, in seconds: four times as much still lasts less than SHORT.
VERY_SHORT = SHORT / 4


class Appetite:
    """Messages to have in hand, between `least` (one a thread) and `most`.

    It begins small: a process that cannot run a hundred messages soon must not keep them from
    its siblings. It claims when half of what is wanted is gone; of that, a claim takes a `batch`.
    """

    def __init__(
        self, *, least: int, most: int, batch: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._floor = least
        self._most = max(least, most)
        self._batch = batch
        self._clock = clock
        self._wanted = least
        self._asked = 0
        self._fed_at: float | None = None
        self._full_since: float | None = None

    @property
    def wanted(self) -> int:
        """How many messages to have in hand."""
        return self._wanted

    @property
    def least(self) -> int:
        """With fewer messages than this in hand, it is time to claim."""
        return self._wanted - self._smallest() + 1

    def room(self, waiting: int) -> int:
        """Return how many messages to claim when `waiting` are in hand; 0: none yet."""
        if waiting < self.least:
            self._learn()
        room = self._wanted - waiting
        self._asked = room if room >= self._smallest() else 0
        return self._asked

    def fed(self, count: int) -> None:
        """A claim took `count` messages: only a full one says anything about the appetite."""
        self._fed_at = self._clock() if count >= min(self._asked, self._batch) else None

    def glutted(self, waiting: int) -> bool:
        """Say whether there was no need to claim for so long that others should have the rest.

        To be asked now and then with how many messages are in hand: fast ones may have taught it
        to hold hundreds, and then came slow ones.
        """
        if waiting < self.least:
            self._full_since = None
            return False
        if self._full_since is None:
            self._full_since = self._clock()
        return self._clock() - self._full_since > 2 * LONG

    def lose(self) -> None:
        """What was in hand had to be given back: begin small again."""
        self._wanted, self._fed_at, self._full_since = self._floor, None, None

    def _learn(self) -> None:
        if self._fed_at is None:
            return
        lasted = self._clock() - self._fed_at
        self._fed_at = None
        if lasted < SHORT:
            growth = 4 if lasted < VERY_SHORT else 2
            self._wanted = min(self._wanted * growth, self._most)
        elif lasted > LONG:
            self._wanted = max(self._wanted // 2, self._floor)

    def _smallest(self) -> int:
        return max(1, self._wanted // 2)
