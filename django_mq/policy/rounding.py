"""Counts as text: with their noun, or with an estimate where they stopped at a limit."""

from __future__ import annotations


def message_count(n: int) -> str:
    """Return the number `n` with its noun.

    >>> message_count(1), message_count(1200)
    ('1 message', '1,200 messages')
    """
    return f"{n:,} message{'' if n == 1 else 's'}"


def round_estimate(count: int) -> int:
    """Return an estimate, rounded to the digits that are significant.

    >>> round_estimate(1_234_567), round_estimate(98_765), round_estimate(7), round_estimate(-3)
    (1200000, 99000, 7, 0)
    """
    return round(count, min(0, 2 - len(str(count)))) if count > 0 else 0


def counted(count: int, estimate: int, *, stopped: bool) -> str:
    """Return a count as text; if it `stopped`, the estimate or, when that is lower, a `+`.

    >>> counted(12, 0, stopped=False), counted(10_000, 182_345, stopped=True)
    ('12', '≈ 180,000')
    >>> counted(10_000, 0, stopped=True)
    '10,000+'
    """
    if not stopped:
        return f"{count:,}"
    return f"≈ {round_estimate(estimate):,}" if round_estimate(estimate) > count else f"{count:,}+"
