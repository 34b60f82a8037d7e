"""Which times of a schedule are due, and which comes next; all times are aware, in UTC."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, takewhile
from typing import Literal, NamedTuple, Protocol

CatchUp = Literal["once", "all", "none"]
Overlap = Literal["allow", "skip"]
CATCH_UP: tuple[CatchUp, ...] = ("once", "all", "none")
OVERLAP: tuple[Overlap, ...] = ("allow", "skip")

#: The maximum number of missed times (the newest) that `catch_up="all"` broadcasts later.
MAX_MISSED = 1000
#: How late a time may be without counting as missed, in addition to the fleet's own delay.
GRACE = timedelta(minutes=1)
#: How far back the first search for missed times goes; each further search goes twice as far.
FIRST_SEARCH = timedelta(minutes=1)


class Times(Protocol):
    """The times of a schedule."""

    def after(self, at: datetime) -> Iterator[datetime]:
        """Yield the times later than `at`, in order."""


@dataclass(frozen=True, slots=True)
class IntervalTimes:
    """One time per `every`, counted from `start` in both directions.

    >>> from datetime import UTC
    >>> hourly = IntervalTimes(timedelta(hours=1), start=datetime(2026, 1, 1, 0, 30, tzinfo=UTC))
    >>> next(hourly.after(datetime(2026, 1, 1, 7, 30, tzinfo=UTC))).isoformat()
    '2026-01-01T08:30:00+00:00'
    """

    every: timedelta
    start: datetime

    def after(self, at: datetime) -> Iterator[datetime]:
        """Yield the times later than `at`, in order, as far as Python has dates."""
        with suppress(OverflowError):
            for number in count((at - self.start) // self.every + 1):
                yield self.start + self.every * number


class DueTimes(NamedTuple):
    """The times to broadcast now, in order, and the next time after now, if there is one."""

    times: tuple[datetime, ...]
    next_at: datetime | None


def due(
    times: Times, *, next_at: datetime, now: datetime, catch_up: CatchUp, late: timedelta
) -> DueTimes:
    """Decide what to broadcast at `now` for a schedule that was due at `next_at`.

    `once` broadcasts the latest due time, `all` the newest MAX_MISSED. `none` broadcasts the latest
    unless it was missed. It was missed if it is more than `late` ago. If even `next_at` is more
    than `late` ago, it was also missed if another time follows within `late`.
    """
    following = next(times.after(now), None)
    if next_at > now:
        return DueTimes((), next_at)
    maximum = MAX_MISSED if catch_up == "all" else 1
    found = last_times(times, first=next_at, until=now, maximum=maximum)
    if catch_up == "none" and now - next_at > late:
        # No worker ran. With a schedule that runs every minute, the latest time is never later than
        # `late`, so its own delay does not show that; but it is no loss, since the next time is
        # near.
        follows_soon = following is not None and following - now <= late
        if follows_soon or now - found[-1] > late:
            return DueTimes((), following)
    return DueTimes(tuple(found), following)


def last_times(times: Times, *, first: datetime, until: datetime, maximum: int) -> list[datetime]:
    """Return the last `maximum` times from `first` (itself a time) to `until`, in order.

    Searches only forward, from ever earlier starts: a schedule that runs every minute and was idle
    for a year costs as little as one that was idle for an hour.
    """
    window = FIRST_SEARCH
    while until - window > first:
        found = deque(_between(times, until - window, until), maximum)
        if len(found) == maximum:
            return list(found)
        window *= 2
    return list(deque((first, *_between(times, first, until)), maximum))


def _between(times: Times, after: datetime, until: datetime) -> Iterator[datetime]:
    return takewhile(lambda at: at <= until, times.after(after))
