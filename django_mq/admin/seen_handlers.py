"""The handlers registered here that a user may see, and the types that the user probably meant."""

from __future__ import annotations

from collections.abc import Collection

from django_mq.conf import get_settings
from django_mq.handlers import Handler, all_handlers, allowed_queues, is_subscribed
from django_mq.handlers.nearest import probable_types


def seen_handlers(allowed: Collection[str] | None) -> list[Handler]:
    """Return the handlers that take from one of the `allowed` queues, None for all.

    A handler that takes from any queue counts only if a queue that it names is allowed, since its
    numbers are those of all queues.
    """
    if allowed is None:
        return list(all_handlers())
    settings = get_settings()
    return [
        each
        for each in all_handlers()
        if not set(allowed).isdisjoint(allowed_queues(each, settings))
    ]


def did_you_mean(type: str, allowed: Collection[str] | None) -> str:
    """Return a question, empty if a handler here takes `type` or no known type resembles it.

    It names only types that the user may see: those of handlers with an `allowed` queue.
    """
    seen = seen_handlers(allowed)
    found = [
        each
        for each in probable_types(type)
        if any(is_subscribed(handler, each) for handler in seen)
    ]
    return f"Did you mean {' or '.join(found)}?" if found else ""
