"""How many messages to hold: enough to keep executors busy, without starving siblings."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

#: How many seconds the held messages should last: the target doubles below SHORT, halves above
#: LONG.
SHORT, LONG = 0.25, 1.0
#: If they last less than this, in seconds, the target is multiplied by four: even then they last
#: less than SHORT.
VERY_SHORT = SHORT / 4


class Prefetch:
    """The number of messages to hold, between `minimum` (one per thread) and `maximum`.

    It starts small, so that a process with slow handlers does not keep a hundred messages from
    its siblings. It claims when half of the target is gone, up to `batch` messages per claim.
    """

    def __init__(
        self, *, minimum: int, maximum: int, batch: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._minimum = minimum
        #: The most messages to hold.
        self.maximum = max(minimum, maximum)
        self._batch = batch
        self._clock = clock
        #: The number of messages to hold.
        self.target = minimum
        self._asked = 0
        self._claimed_at: float | None = None
        # A time at which messages waited, and how many had started by then.
        self._counted: tuple[float, int] | None = None

    @property
    def claim_below(self) -> int:
        """Claim when fewer messages than this are held."""
        return self.target - self._half() + 1

    def room(self, waiting: int) -> int:
        """Return how many messages to claim while `waiting` messages are held; 0: none yet."""
        if waiting < self.claim_below:
            self._adapt()
        room = self.target - waiting
        self._asked = room if room >= self._half() else 0
        return self._asked

    def claimed(self, count: int) -> None:
        """Note that a claim took `count` messages; only a full claim shows how long they last."""
        self._claimed_at = self._clock() if count >= min(self._asked, self._batch) else None

    def holds_too_much(self, waiting: int, taken: int) -> bool:
        """Return whether the `waiting` messages will last so long that siblings should get them.

        They would last for more than 2 * LONG at the rate of the last 2 * LONG; `taken` counts the
        messages that have started. Call this regularly: fast messages may have raised the target to
        hundreds before slow ones come.
        """
        now = self._clock()
        if not waiting:
            self._counted = None
            return False
        if self._counted is None:
            self._counted = now, taken
        since, before = self._counted
        if now - since <= 2 * LONG:
            return False
        self._counted = now, taken
        return taken - before < waiting

    def reset(self) -> None:
        """Start small again, after held messages had to be released."""
        self.target, self._claimed_at, self._counted = self._minimum, None, None

    def _adapt(self) -> None:
        if self._claimed_at is None:
            return
        lasted = self._clock() - self._claimed_at
        self._claimed_at = None
        if lasted < SHORT:
            growth = 4 if lasted < VERY_SHORT else 2
            self.target = min(self.target * growth, self.maximum)
        elif lasted > LONG:
            self.target = max(self.target // 2, self._minimum)

    def _half(self) -> int:
        return max(1, self.target // 2)
