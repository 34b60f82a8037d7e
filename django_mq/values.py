"""Durations and moments as callers give them, and any value as text for an error."""

from __future__ import annotations

import math
import numbers
import reprlib
from datetime import MINYEAR, UTC, datetime, timedelta
from decimal import Decimal

#: A duration.
Seconds = float | timedelta
#: A wait or a moment: seconds, a timedelta, or an aware datetime.
When = float | timedelta | datetime

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def short_repr(value: object) -> str:
    """Return a value as text for an error: a few hundred characters at most, whatever it is.

    >>> short_repr("5"), short_repr(10**5000)
    ("'5'", 'a value of type int')
    """
    try:
        return _SHORT.repr(value)
    except Exception:  # an integer of more digits than Python prints; a hostile subclass
        return f"a value of type {type(value).__name__}"


def as_seconds(value: object) -> float | None:
    """Return a number or a timedelta as seconds; None unless it is finite and >= 0.

    >>> as_seconds(timedelta(minutes=1)), as_seconds(2), as_seconds(-1), as_seconds("2")
    (60.0, 2.0, None, None)
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    else:
        try:
            seconds = float(value)
        except (OverflowError, ValueError):  # 10**400; Decimal("sNaN")
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def checked_when(after: When) -> float | datetime:
    """Return `after` as seconds from now, or in UTC if it is an aware datetime.

    Raises ValueError for a naive datetime, and for anything that is neither a datetime nor a
    duration that `as_seconds()` accepts.

    >>> checked_when(timedelta(minutes=2))
    120.0
    """
    if isinstance(after, datetime):
        if after.tzinfo is None or after.utcoffset() is None:
            raise ValueError(f"{short_repr(after)} is naive; give an aware datetime or seconds")
        return in_utc(after)
    seconds = as_seconds(after)
    if seconds is None:
        raise ValueError(
            f"{short_repr(after)} is not a valid wait; give seconds of zero or more, a timedelta or"
            " an aware datetime"
        )
    return seconds


def in_utc(at: datetime) -> datetime:
    """Return an aware datetime in UTC; where Python has no such year, its first or last moment.

    PostgreSQL refuses text with an offset of 16 hours or more, or with a fraction of a second in
    the offset; Python's datetimes may have both.
    """
    try:
        return at.astimezone(UTC)
    except OverflowError:
        return (datetime.min if at.year == MINYEAR else datetime.max).replace(tzinfo=UTC)
