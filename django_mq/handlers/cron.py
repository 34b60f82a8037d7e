"""Read the times of a schedule: a cron expression in a time zone, or an interval.

`cronsim` reads cron expressions. It comes with the extra `periodic`, so it is imported on use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from importlib.util import find_spec
from zoneinfo import ZoneInfo

from django_mq.exceptions import InvalidOption
from django_mq.policy.due_times import IntervalTimes, Times
from django_mq.policy.durations import span

#: Characters of a cron expression and of the name of a time zone.
CRON_LENGTH, ZONE_LENGTH = 256, 64

#: Ordinals to which cronsim wrongly appends `th`: 21, 22, 23, 31 ...
_ORDINAL = re.compile(r"\b([2-5])([123])th\b")
_ENDINGS = {"1": "st", "2": "nd", "3": "rd"}

NOT_INSTALLED = "cron= needs the package cronsim: pip install 'django-mq[periodic]', or use every="


class UnknownZone(InvalidOption):
    """This host does not know the time zone; a host with newer data may."""


def can_read_cron() -> bool:
    """Return whether `cronsim` is installed."""
    return find_spec("cronsim") is not None


def times_of(cron: str, every: timedelta | None, tz: str, *, start: datetime) -> Times:
    """Return the times of a schedule; the times of an interval are counted from `start`.

    Raises InvalidOption for a bad expression, an unknown time zone, an interval below a second and,
    without `cronsim`, for any expression.
    """
    zone = zone_of(tz)
    if cron:
        return Cron(cron, zone)
    if every is None or every < timedelta(seconds=1):
        raise InvalidOption(f"every must be at least 1 s, not {every}")
    return IntervalTimes(every, start)


def in_words(cron: str, every: timedelta | None, tz: str) -> str:
    """Return the times of a schedule in English, the same for commands and the admin.

    An expression that cannot be read, because it is bad or `cronsim` is missing, is returned
    unchanged.

    >>> in_words("0 6 * * mon-fri", None, "Europe/Berlin")
    'at 06:00 on Monday through Friday, Europe/Berlin'
    >>> in_words("", timedelta(hours=1), "UTC")
    'every 1 h'
    """
    if cron:
        return f"{_explained(cron)}, {tz}"
    return "never" if every is None else f"every {span(every)}"


def _explained(cron: str) -> str:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        return cron
    try:
        words = CronSim(cron, datetime(2000, 1, 1, tzinfo=UTC)).explain()
    except (CronSimError, ValueError):
        return cron
    words = _ORDINAL.sub(lambda found: found[1] + found[2] + _ENDINGS[found[2]], words)
    return words[:1].lower() + words[1:]


def zone_of(tz: str) -> tzinfo:
    """Return the time zone of this name; raises UnknownZone if this host has none."""
    if tz == "UTC":
        return UTC
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError) as error:
        raise UnknownZone(
            f"tz names the unknown time zone {tz[:ZONE_LENGTH]!r}: give a name such as"
            " Europe/Berlin (on a system without time zones, install tzdata)"
        ) from error


class Cron:
    """The times of a cron expression in a time zone, computed like those of Debian's cron.

    A fixed hour and minute runs once in a repeated hour, and after a skipped one; wildcards, and
    expressions with seconds, run in both repetitions. Raises InvalidOption for an expression that
    is bad, or that has no time within 50 years.
    """

    def __init__(self, expression: str, zone: tzinfo) -> None:
        try:
            from cronsim import CronSim, CronSimError
        except ImportError as error:
            raise InvalidOption(NOT_INSTALLED) from error
        self._simulate = CronSim
        self._expression, self._zone = expression, zone
        if len(expression) > CRON_LENGTH:
            raise InvalidOption(f"cron has more than {CRON_LENGTH} characters")
        try:
            found = next(self.after(datetime(2000, 1, 1, tzinfo=UTC)), None)
        except (CronSimError, ValueError) as error:
            raise InvalidOption(f"cron={expression!r} cannot be read: {error}") from error
        if found is None:
            raise InvalidOption(f"cron={expression!r} has no time in 50 years")

    def after(self, at: datetime) -> Iterator[datetime]:
        """Yield the times later than `at`, in order, as far as Python has dates."""
        last = at
        with suppress(OverflowError):
            for local in self._simulate(self._expression, at.astimezone(self._zone)):
                # Compared in UTC: within one zone Python compares wall clocks. In the second half
                # of a repeated hour cronsim begins with times of the first.
                found = local.astimezone(UTC)
                if found > last:
                    last = found
                    yield found
