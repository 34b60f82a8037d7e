"""The figures of this process by minute, which the heartbeat stores.

Counts are absolute, so that a row may be written any number of times.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from django_mq.executor.lease_clock import lease_clock
from django_mq.policy.handler_totals import HandlerTotals
from django_mq.store.figures import ArrivalCount, MinuteRow

MINUTE = 60
#: How long a message is counted in the minute of its creation. The roll-up waits for an hour.
ARRIVAL_WINDOW = 55 * MINUTE


class FigureSource(NamedTuple):
    """The queue and the handler by which figures are counted."""

    queue: str
    handler: str


class MinuteKey(NamedTuple):
    """The key of a row of figures; `minute` is in seconds since 1970."""

    minute: int
    source: FigureSource


class Minutes:
    """The totals of each handler by minute, and the sum of past minutes.

    The database's clock defines the minutes. Until `set_clock()`, the minute is 0. Thread-safe,
    except `minute()`, `current()` and `arrived()`: these need `lock`, and so does a change of the
    totals.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._past: dict[FigureSource, HandlerTotals] = {}
        self._open: dict[MinuteKey, HandlerTotals] = {}
        self._arrived: dict[MinuteKey, int] = {}
        self._changed: set[MinuteKey] = set()
        self._taken: set[MinuteKey] = set()
        self._offset: float | None = None
        self._latest = 0

    def set_clock(self, now: float, asked_at: float) -> None:
        """Record that the database's clock showed `now` when `lease_clock()` showed `asked_at`."""
        with self.lock:
            first, self._offset = self._offset is None, now - asked_at
            if first:
                minute = self.minute()
                for counts in (self._open, self._arrived):
                    _move(counts, minute)
                self._changed = {key._replace(minute=minute) for key in self._changed}

    def minute(self) -> int:
        """Return the current minute. It never goes back, since final rows are not written again."""
        if self._offset is not None:
            now = int(lease_clock() + self._offset)
            self._latest = max(self._latest, now - now % MINUTE)
        return self._latest

    def current(self, source: FigureSource) -> HandlerTotals:
        """Return the totals of `source` in the current minute, to be added to."""
        key = MinuteKey(self.minute(), source)
        self._changed.add(key)
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = HandlerTotals()
        return found

    def arrived(self, source: FigureSource, created: Sequence[float]) -> None:
        """Count messages in the minute of their creation, or now if that is too long ago."""
        first, last = (int(at) // MINUTE * MINUTE for at in (min(created), max(created)))
        if first == last:
            self._arrive(source, first, len(created))
        else:
            for at in created:
                self._arrive(source, int(at) // MINUTE * MINUTE, 1)

    def _arrive(self, source: FigureSource, minute: int, count: int) -> None:
        latest = self.minute()
        key = MinuteKey(minute if latest - ARRIVAL_WINDOW < minute <= latest else latest, source)
        self._arrived[key] = self._arrived.get(key, 0) + count
        self._changed.add(key)

    def take_unwritten(self) -> tuple[list[MinuteRow], list[ArrivalCount]]:
        """Return the rows that changed since they were last taken; none before `set_clock()`.

        Call `written()` or `not_written()` afterwards.
        """
        with self.lock:
            if self._offset is None:
                return [], []
            self._taken, self._changed = self._changed, set()
            keys = sorted(self._taken)  # all workers write in the same order
            return (
                [_row(key, self._open[key]) for key in keys if key in self._open],
                [
                    ArrivalCount(key.minute, *key.source, self._arrived[key])
                    for key in keys
                    if key in self._arrived
                ],
            )

    def written(self) -> None:
        """Forget the rows that can no longer change: the rows taken last are stored."""
        with self.lock:
            self._taken = set()
            latest = self.minute()
            for key in [
                key for key in self._open if key.minute < latest and key not in self._changed
            ]:
                total = self._open.pop(key)
                total.merge(self._past.get(key.source, HandlerTotals()))
                self._past[key.source] = total
            for key in [key for key in self._arrived if key.minute <= latest - ARRIVAL_WINDOW]:
                if key not in self._changed:
                    del self._arrived[key]

    def not_written(self) -> None:
        """Return the same rows again next time: they could not be stored."""
        with self.lock:
            self._changed |= self._taken

    def total(self, source: FigureSource) -> HandlerTotals:
        """Return the sum of all totals of `source`."""
        with self.lock:
            total = HandlerTotals()
            for key in sorted(self._open, reverse=True):
                if key.source == source:
                    total.merge(self._open[key])
            total.merge(self._past.get(source, HandlerTotals()))
            return total


def _move(counts: dict[MinuteKey, Any], minute: int) -> None:
    for key in list(counts):
        counts[key._replace(minute=minute)] = counts.pop(key)


def _row(key: MinuteKey, total: HandlerTotals) -> MinuteRow:
    return MinuteRow(
        key.minute,
        *key.source,
        acked=total.acked,
        failed=total.failed,
        retried=total.retried,
        dead=total.dead,
        waited=total.waited.counts(),
        ran=total.ran.counts(),
    )
