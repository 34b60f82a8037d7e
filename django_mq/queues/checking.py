"""Numbers that callers give: what the database would refuse is refused before it is asked."""

from __future__ import annotations

LARGEST = 2**63 - 1
#: Seconds, 5,000 years: what lies further ahead or back has no date here.
LONGEST = 5000 * 365.25 * 86400


def whole(value: object, what: str, *, most: int = LARGEST) -> int:
    """Return `value`, a whole number from 1 to `most`; raise ValueError for anything else.

    >>> whole(7, "limit")
    7
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} is a whole number from 1 to {most:,}, not {value!r}")
    return value
