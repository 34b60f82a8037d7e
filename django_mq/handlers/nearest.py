"""Suggest known types and handlers for one that is unknown here."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache

from django_mq.handlers.registry import all_handlers
from django_mq.policy.routing import plain_types

#: How similar a suggested name must be, from 0 to 1, and how many are suggested.
CUTOFF, MOST = 0.7, 3
PLACE = "handlers are looked for in handlers.py of each installed app"


def nearest_types(type: str) -> str:
    """Return the similar plain types that handlers here take, and where handlers are looked for."""
    patterns = {pattern for each in all_handlers() for pattern in each.patterns}
    return _told(type, tuple(sorted(plain_types(patterns))))


def nearest_handlers(name: str) -> str:
    """Return the handlers here with similar names, and where handlers are looked for."""
    return _told(name, tuple(sorted(each.name for each in all_handlers())))


@lru_cache(maxsize=256)
def _told(name: str, known: tuple[str, ...]) -> str:
    """Return the remark that follows an unknown name in an error text.

    >>> _told("shop.order.placed", ("shop.orders.placed", "mail.sent")) == (
    ...     f" (did you mean shop.orders.placed? {PLACE})"
    ... )
    True
    >>> _told("x", ()) == f" ({PLACE})"
    True
    """
    near = get_close_matches(name, known, MOST, CUTOFF)
    return f" (did you mean {' or '.join(near)}? {PLACE})" if near else f" ({PLACE})"
