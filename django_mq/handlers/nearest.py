"""Suggest known types and handlers for one that is unknown here."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache

from django_mq.handlers.registry import all_handlers

#: How similar a name must be, from 0 to 1, and how many are named.
CUTOFF, MOST = 0.7, 3
PLACE = "handlers are looked for in handlers.py of each installed app"


def nearest_types(type: str) -> str:
    """Return which plain types handlers here take that are spelled like `type`, and their place."""
    patterns = {pattern for each in all_handlers() for pattern in each.patterns}
    return _told(type, tuple(sorted(p for p in patterns if "*" not in p and "#" not in p)))


def nearest_handlers(name: str) -> str:
    """Return which handlers here have names like `name`, and where they are looked for."""
    return _told(name, tuple(sorted(each.name for each in all_handlers())))


@lru_cache(maxsize=256)
def _told(name: str, known: tuple[str, ...]) -> str:
    """Return a remark that follows the name.

    >>> _told("shop.order.placed", ("shop.orders.placed", "mail.sent")) == (
    ...     f" (did you mean shop.orders.placed? {PLACE})"
    ... )
    True
    >>> _told("x", ()) == f" ({PLACE})"
    True
    """
    near = get_close_matches(name, known, MOST, CUTOFF)
    return f" (did you mean {' or '.join(near)}? {PLACE})" if near else f" ({PLACE})"
