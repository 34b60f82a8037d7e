"""Tell the supervisor, through the scoreboard, which parts of the worker move."""

from __future__ import annotations

from collections.abc import Callable

from django_mq.executor.connections import Outage
from django_mq.executor.scoreboard import MonitoredPart, Scoreboard
from django_mq.executor.watchdog import Link, Watchdog

#: A part is stalled after INTERVALS missed intervals, and after STILL seconds at the earliest: a
#: reconnect takes less. A part that waits for the server counts as moving, within the limit of its
#: link.
INTERVALS, STILL = 3, 20.0


def patience(interval: float) -> float:
    """Return the seconds in which a part that moves each `interval` seconds must move.

    >>> patience(1.0), patience(10.0)
    (20.0, 30.0)
    """
    return max(INTERVALS * interval, STILL)


class Liveness:
    """Follows the parts; the loop looks for work every `poll` seconds."""

    def __init__(
        self, scoreboard: Scoreboard, watchdog: Watchdog, outage: Outage, *, poll: float
    ) -> None:
        #: Whether the tables have proved usable: before that, a recovery could only fail.
        self.usable = False
        self._scoreboard = scoreboard
        self._watchdog = watchdog
        self._outage = outage
        self._poll = poll
        self._intervals: dict[MonitoredPart, float] = {}

    def follow(self, part: MonitoredPart, interval: float, progress: Callable[[], object]) -> None:
        """Report a part as moving each time that `progress()` has changed."""
        self._intervals[part] = interval
        self._watchdog.follow(
            progress, lambda: self._scoreboard.note_progress(part, patience(interval))
        )

    def follow_answers(self, link: Link) -> None:
        """Note that the database answers on `link`, once the tables have proved usable."""
        self._watchdog.follow(
            lambda: (link.answers, self._outage.lost) if self.usable else None, self._note_answers
        )

    def proved(self) -> None:
        """Note that the tables can be used, and that all parts move: the worker is ready."""
        self.usable = True
        self._note_answers()
        for part, interval in self._intervals.items():
            self._scoreboard.note_progress(part, patience(interval))

    def _note_answers(self) -> None:
        within = 0.0 if self._outage.lost else patience(self._poll)
        self._scoreboard.note_progress(MonitoredPart.DATABASE, within)
