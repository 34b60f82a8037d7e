"""Whether the event loop of async handlers moves, or one of them blocks it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

#: Seconds without an answer after which the loop counts as blocked. Much longer than a turn of a
#: loop that is only busy: a thousand coroutines that compute for 0.1 ms take 0.1 s.
BLOCKED_AFTER = 1.0
#: Seconds after its last answer in which the loop is not asked again.
ASK_AFTER = 0.25
#: Seconds from the first look at which the loop is blocked until that is reported. A process that
#: was frozen looks blocked for a moment, too.
REPORT_AFTER = 2.0


class LoopWatch:
    """Asks the loop to call `moved()`, and sees whether it does so in time.

    The thread that claims asks; only the loop answers. No lock: each attribute has one owner, or
    the order of the writes suffices. `on_moved` is called when a loop that was seen blocked moves.
    """

    def __init__(self, on_moved: Callable[[], None]) -> None:
        self._on_moved = on_moved
        # When the oldest question was put that the loop has not answered.
        self._asked_at: float | None = None
        self._moved_at = float("-inf")
        self._seen_blocked_at: float | None = None
        self._reported = False

    def ask(self) -> None:
        """Note that the loop has been given a callback that calls `moved()`, or is given it now."""
        if self._asked_at is None:
            self._asked_at = monotonic()

    def moved(self) -> bool:
        """Answer; return whether nobody saw the loop blocked before. Called on the loop."""
        self._moved_at = monotonic()
        self._asked_at = None
        if self._seen_blocked_at is None:
            return True
        self._seen_blocked_at = None
        self._reported = False
        self._on_moved()
        return False

    def blocked(self) -> bool:
        """Return whether the loop has not answered for BLOCKED_AFTER seconds."""
        asked_at = self._asked_at
        if asked_at is None or (now := monotonic()) - asked_at < BLOCKED_AFTER:
            return False
        if self._seen_blocked_at is None:
            self._seen_blocked_at = now
        if self._asked_at is None:  # just now, and `moved()` may have called nobody
            self._seen_blocked_at = None
            return False
        return True

    def is_to_be_asked(self) -> bool:
        """Return whether the loop has been neither asked nor seen to move for ASK_AFTER seconds."""
        return self._asked_at is None and monotonic() - self._moved_at >= ASK_AFTER

    def is_to_be_reported(self) -> float | None:
        """Return for how many seconds the loop has been blocked, once it is time to report that."""
        asked_at, seen_at = self._asked_at, self._seen_blocked_at
        if self._reported or asked_at is None or seen_at is None:
            return None
        now = monotonic()
        if now - seen_at < REPORT_AFTER:
            return None
        self._reported = True
        return now - asked_at

    def look_in(self, *, starting: bool) -> float:
        """Return the seconds until the next look; infinity if there is no reason to look.

        There is one while calls are `starting`, and until a loop that is blocked is reported.
        """
        now, asked_at, seen_at = monotonic(), self._asked_at, self._seen_blocked_at
        at = float("inf")
        if seen_at is not None and not self._reported:
            at = seen_at + REPORT_AFTER
        if starting:
            next_ = self._moved_at + ASK_AFTER if asked_at is None else asked_at + BLOCKED_AFTER
            at = min(at, next_)
        return max(0.0, at - now)
