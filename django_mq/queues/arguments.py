"""Check numeric arguments before the database would refuse them."""

from __future__ import annotations

LARGEST = 2**63 - 1
#: Seconds in 5,000 years; `datetime` cannot represent moments much further away.
LONGEST = 5000 * 365.25 * 86400


def whole(value: object, what: str, *, most: int = LARGEST) -> int:
    """Return `value` if it is a whole number from 1 to `most`; raise ValueError otherwise.

    >>> whole(7, "limit")
    7
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{what} must be a whole number from 1 to {most:,}, not {value!r}")
    return value
