"""Durations as people read them, on pages and in the terminal."""

from __future__ import annotations

from datetime import timedelta

#: Seconds that a timedelta can hold.
_MAX_SECONDS = 86400 * 999_999_999
# Seconds and name of a unit, then of the next smaller one.
_UNITS = (
    (86400, "d", 3600, "h"),
    (3600, "h", 60, "min"),
    (60, "min", 1, "s"),
    (1, "s", 1, ""),
)


def span(duration: timedelta) -> str:
    """Return a duration in its two largest units, to the second.

    >>> span(timedelta(seconds=93.7)), span(timedelta(days=2, hours=3)), span(timedelta(0))
    ('1 min 33 s', '2 d 3 h', '0 s')
    """
    seconds = max(0, int(duration.total_seconds()))
    for size, unit, smaller, name in _UNITS:
        if seconds >= size:
            count, rest = seconds // size, seconds % size // smaller
            return f"{count} {unit} {rest} {name}" if rest else f"{count} {unit}"
    return "0 s"


def precise_span(seconds: float) -> str:
    """Return a measured duration: to three digits below a minute, else like `span()`.

    >>> precise_span(0.0000071), precise_span(0.0042), precise_span(0.42)
    ('7.1 µs', '4.2 ms', '420 ms')
    >>> precise_span(4.2), precise_span(93.7)
    ('4.2 s', '1 min 33 s')
    >>> precise_span(0.0), precise_span(0.9999), precise_span(59.99)
    ('0 ms', '1 s', '1 min')
    """
    if seconds <= 0:
        return "0 ms"
    for size, unit, maximum in ((1e-6, "µs", 1000), (1e-3, "ms", 1000), (1.0, "s", 60)):
        shown = float(f"{seconds / size:.3g}")
        if shown < maximum:
            return f"{shown:g} {unit}"
    return span(timedelta(seconds=min(max(seconds, 60.0), _MAX_SECONDS)))
