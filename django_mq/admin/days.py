"""The years, months and days by which users browse a list of messages, without reading messages.

A period is offered if it lies between the oldest and the newest message, even if it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import islice

FROM, TO = "created_at_from", "created_at_to"
#: The maximum number of periods that are offered.
MAX_PERIODS = 40
#: The longest spans, in days, for which days and months are offered; for longer ones, years.
DAYS, MONTHS = 31, 366


@dataclass(frozen=True, slots=True)
class Period:
    """A year, a month or a day: from `start`, before `end`."""

    start: date
    end: date

    @property
    def label(self) -> str:
        """The period in ISO 8601: `2026`, `2026-12`, `2026-12-24`."""
        parts = 10 if self.is_day else 7 if (self.end - self.start).days <= DAYS else 4
        return self.start.isoformat()[:parts]

    @property
    def is_day(self) -> bool:
        return self.end - self.start == timedelta(days=1)

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of the filter by creation time."""
        return {FROM: self.start.isoformat(), TO: self.end.isoformat()}


def year(day: date) -> Period:
    """Return the year of `day`.

    >>> year(date(2026, 12, 24)).label
    '2026'
    """
    return Period(date(day.year, 1, 1), date(day.year + 1, 1, 1))


def month(day: date) -> Period:
    """Return the month of `day`.

    >>> month(date(2026, 12, 24)).label
    '2026-12'
    """
    start = day.replace(day=1)
    return Period(start, (start + timedelta(days=31)).replace(day=1))


def one_day(day: date) -> Period:
    """Return the period of one day."""
    return Period(day, day + timedelta(days=1))


def chosen(parameters: Mapping[str, str]) -> Period | None:
    """Return the period that the parameters name, None if they name none or another span."""
    try:
        start, end = (date.fromisoformat(parameters.get(name, "")) for name in (FROM, TO))
    except ValueError:
        return None
    offered = (year(start), month(start), one_day(start)) if start.year < 9999 else ()
    return next((each for each in offered if each == Period(start, end)), None)


def above(period: Period) -> list[Period]:
    """Return the wider periods that lead to `period`, the widest first.

    >>> [each.label for each in above(one_day(date(2026, 12, 24)))]
    ['2026', '2026-12']
    """
    wider = (year(period.start), month(period.start))
    return [each for each in wider if each != period and period.end <= each.end]


def within(first: date, last: date, period: Period | None) -> list[Period]:
    """Return the periods from `first` to `last`, in `period` if one is chosen, the newest first.

    Raises ValueError or OverflowError for years that a date cannot have.

    >>> [each.label for each in within(date(2026, 11, 29), date(2026, 12, 1), None)]
    ['2026-12-01', '2026-11-30', '2026-11-29']
    >>> [each.label for each in within(date(2026, 6, 1), date(2026, 8, 1), None)]
    ['2026-08', '2026-07', '2026-06']
    """
    if period is not None:
        first, last = max(first, period.start), min(last, period.end - timedelta(days=1))
        if period.is_day:
            return []
    span = (last - first).days + 1
    unit = one_day if span <= DAYS else month if span <= MONTHS else year

    def back() -> Iterator[Period]:
        day = last
        while day >= first:
            found = unit(day)
            yield found
            day = found.start - timedelta(days=1)

    return list(islice(back(), MAX_PERIODS))
