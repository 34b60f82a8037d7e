"""Suggest known names for an unknown one: types, handlers, queues, schedules."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

#: How similar a suggested name must be, from 0 to 1, and how many are suggested.
CUTOFF, MAX_SUGGESTIONS = 0.7, 3
#: How similar names are with letters of a word in another order, or in other case.
TYPING_SLIP = 0.95


def similar(
    name: str, known: Iterable[str], cutoff: float = CUTOFF, most: int = MAX_SUGGESTIONS
) -> list[str]:
    """Return the `known` names that resemble `name`, the most similar first.

    Only the words in which two names differ are compared: with its first two words,
    shop.orders.refunded would resemble every type of shop.orders.

    >>> similar("shop.order.placed", ["shop.orders.placed", "shop.orders.paid"])
    ['shop.orders.placed']
    >>> similar("shop.odrers.placed", ["shop.orders.placed"], cutoff=0.85)
    ['shop.orders.placed']
    >>> similar("orders.placed", ["shop.orders.placed"])
    ['shop.orders.placed']
    >>> similar("shop.orders.refunded", ["shop.orders.placed", "shop.orders.paid"])
    []
    """
    rated = [(_likeness(name, each, cutoff), each) for each in sorted(set(known))]
    found = [pair for pair in rated if pair[0] >= cutoff]
    found.sort(key=lambda pair: -pair[0])
    return [each for _, each in found[:most]]


def _likeness(name: str, other: str, cutoff: float) -> float:
    """Return how similar the least similar words are, from 0 to 1; 0 for less than `cutoff`."""
    words, others = name.split("."), other.split(".")
    if len(words) != len(others):  # perhaps a dot is missing, or the first word
        short, long = sorted((words, others), key=len)
        if len(short) > 1 and long[1:] == short:
            return TYPING_SLIP
        return _ratio(*_rests(words, others), cutoff)
    pairs = (pair for pair in zip(words, others, strict=True) if pair[0] != pair[1])
    return min((_ratio(*pair, cutoff) for pair in pairs), default=1.0)


def _rests(words: list[str], others: list[str]) -> tuple[str, str]:
    """Return what is left of two names without the words with which both begin or end."""
    while words and others and words[0] == others[0]:
        words, others = words[1:], others[1:]
    while words and others and words[-1] == others[-1]:
        words, others = words[:-1], others[:-1]
    return ".".join(words), ".".join(others)


def _ratio(one: str, two: str, cutoff: float) -> float:
    if one.lower() == two.lower() or sorted(one) == sorted(two):
        return TYPING_SLIP
    matcher = SequenceMatcher(None, one, two)
    # The quick ones are upper bounds: most names differ more than that.
    if matcher.real_quick_ratio() < cutoff or matcher.quick_ratio() < cutoff:
        return 0.0
    return matcher.ratio()
