"""Where each scan resumes, so that claims stay fast while dead rows pile up."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from time import monotonic
from typing import Generic, TypeVar

from django_mq.store.claim import LANE_START

#: Seconds between two full scans, if nothing asks for one earlier.
FULL_SCAN_EVERY = 1.0
#: Seconds of rest per second of scan: scans from the front take at most a tenth of the time.
REST_PER_SECOND = 9.0
#: Seconds for which scans are full after one that found little behind the marks.
FULL_SCANS_FOR = 1.0

LaneName = tuple[str, int]
Name = TypeVar("Name", bound=Hashable)


class Rest:
    """How long to rest between scans that start from the front.

    The shorter of the last two counts: a single one may have waited for a lock, such as that of a
    migration, or for a server that stood still.

    >>> rest = Rest()
    >>> rest.after(10.0), rest.after(0.1), rest.after(0.2)
    (0.0, 0.9, 0.9)
    """

    def __init__(self) -> None:
        self._previous = 0.0

    def after(self, seconds: float) -> float:
        """Return the seconds of rest after a scan that took `seconds`."""
        shorter, self._previous = min(seconds, self._previous), seconds
        return REST_PER_SECOND * shorter


class Watermarks(Generic[Name]):
    """Where each named scan resumes, and when the next one must start from the front.

    While a session holds an old snapshot, dead row versions pile up at the front of a scan, and
    every claim would walk over them (4,800/s and falling, against 45,000/s and steady). A full scan
    is due every FULL_SCAN_EVERY seconds, but full scans take at most a tenth of the time.
    """

    def __init__(self) -> None:
        self._watermarks: dict[Name, tuple[float, int]] = {}
        self._full_requested = True
        self._allowed_at = 0.0
        self._rests: dict[Hashable, Rest] = {}
        self._last_full = float("-inf")
        self._usual = float("inf")
        self._few_until = float("-inf")

    def request_full(self) -> None:
        """Request a full scan: after a ring, release or retry a row may be due before the marks."""
        self._full_requested = True

    def full_is_due(self) -> bool:
        """Return whether the next scans start from the front."""
        now = monotonic()
        wanted = self._full_requested or now - self._last_full >= FULL_SCAN_EVERY
        return now < self._few_until or (wanted and now >= self._allowed_at)

    def record_sparse_scan(self) -> None:
        """Note that little lies behind the marks: scans are full for FULL_SCANS_FOR seconds.

        With order keys, a message that is freed when the one before it ends lies before the marks;
        with few keys, nearly all messages do.
        """
        self._few_until = monotonic() + FULL_SCANS_FOR

    def full_in(self) -> float:
        """Return the seconds until a full scan is allowed."""
        return max(0.0, self._allowed_at - monotonic())

    def begin_scan(self, *, full: bool) -> None:
        """Note that a scan begins; a full scan requested from now on is another one."""
        if full:
            self._full_requested = False

    def mark(self, name: Name, *, full: bool) -> tuple[float, int]:
        """Return where the scan of `name` begins."""
        return LANE_START if full else self._watermarks.get(name, LANE_START)

    def advance(self, marks: Mapping[Name, tuple[float, int]]) -> None:
        """Move the marks to where a scan ended."""
        self._watermarks.update(marks)

    def record_scan(
        self,
        marks: Mapping[Name, tuple[float, int]],
        seconds: float,
        *,
        full: bool,
        rest_key: Hashable = None,
    ) -> None:
        """Record a scan that took `seconds` and ended at `marks`.

        Scans with the same `rest_key` share a rest: they are alike.
        """
        self.advance(marks)
        if full:
            self._last_full = monotonic()
            usual = 0.0 if self._usual == float("inf") else self._usual
            extra = max(0.0, seconds - 1.5 * usual)
            rest = self._rests.setdefault(rest_key, Rest()).after(extra)
            self._allowed_at = max(self._allowed_at, self._last_full + rest)
        else:
            usual = self._usual
            self._usual = seconds if usual == float("inf") else usual * 0.9 + seconds * 0.1

    def keep(self, names: Iterable[Name]) -> None:
        """Forget the marks of all other scans."""
        known = set(names)
        self._watermarks = {name: mark for name, mark in self._watermarks.items() if name in known}


class GroupWatermarks(dict[str, Watermarks[LaneName]]):
    """The watermarks of each statement group."""

    def __missing__(self, group: str) -> Watermarks[LaneName]:
        return self.setdefault(group, Watermarks())

    def request_full(self) -> None:
        """Request a full scan of each group."""
        for marks in list(self.values()):
            marks.request_full()

    def keep(self, lanes: Collection[LaneName], groups: Collection[str]) -> None:
        """Forget all but these lanes and groups."""
        for group in self.keys() - set(groups):
            del self[group]
        for marks in self.values():
            marks.keep(lanes)
