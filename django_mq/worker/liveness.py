"""Tell the supervisor, through the scoreboard, which parts of the worker move."""

from __future__ import annotations

from collections.abc import Callable

from django_mq.executor.outage import Outage
from django_mq.executor.scoreboard import MonitoredPart, Scoreboard
from django_mq.executor.watchdog import Watchdog

#: A part is stalled after this many missed intervals, but not before this many seconds, which is
#: longer than a reconnect. A part that waits for the server counts as moving, within the limit of
#: its link.
MISSED_INTERVALS, MIN_STALL_SECONDS = 3, 20.0


def stall_limit(interval: float) -> float:
    """Return within how many seconds a part must move that moves every `interval` seconds.

    >>> stall_limit(1.0), stall_limit(10.0)
    (20.0, 30.0)
    """
    return max(MISSED_INTERVALS * interval, MIN_STALL_SECONDS)


class Liveness:
    """Follows the parts; the loop looks for work every `poll_interval` seconds."""

    def __init__(
        self, scoreboard: Scoreboard, watchdog: Watchdog, outage: Outage, *, poll_interval: float
    ) -> None:
        #: Whether the tables can be used: before that, a recovery would fail.
        self.is_ready = False
        self._scoreboard = scoreboard
        self._watchdog = watchdog
        self._outage = outage
        self._poll_interval = poll_interval
        self._intervals: dict[MonitoredPart, float] = {}

    def follow(self, part: MonitoredPart, interval: float, progress: Callable[[], object]) -> None:
        """Report a part as moving each time that `progress()` has changed."""
        self._intervals[part] = interval
        self._watchdog.follow(
            progress, lambda: self._scoreboard.record_progress(part, stall_limit(interval))
        )

    def follow_answers(self, rounds: Callable[[], int]) -> None:
        """Note that the loop can use the database, once the worker is ready.

        `rounds()` counts its rounds in which the database refused nothing.
        """
        self._watchdog.follow(
            lambda: (rounds(), self._outage.lost) if self.is_ready else None,
            self._record_answers,
        )

    def mark_ready(self) -> None:
        """Record that the tables can be used and all parts move: the worker is ready."""
        self.is_ready = True
        self._record_answers()
        for part, interval in self._intervals.items():
            self._scoreboard.record_progress(part, stall_limit(interval))

    def _record_answers(self) -> None:
        within = 0.0 if self._outage.lost else stall_limit(self._poll_interval)
        self._scoreboard.record_progress(MonitoredPart.DATABASE, within)
