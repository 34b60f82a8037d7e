"""The queues that a worker serves, and names that may be misspelled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches

from django_mq import handlers
from django_mq.conf import Settings
from django_mq.management.output import table
from django_mq.policy.routing import Pattern

#: The maximum number of types shown per handler.
MOST_TYPES = 5


def served(patterns: Iterable[str], settings: Settings) -> str:
    """Return a table of the queues that `patterns` name, and of their handlers here."""
    asked = [Pattern(each) for each in patterns]
    rows = sorted(
        (queue, *cells)
        for queue, *cells in _subscriptions(settings)
        if any(pattern.matches(queue) for pattern in asked)
    )
    if not rows:
        return "No handler here takes messages of these queues."
    return table(("queue", "handler", "types"), rows)


def _subscriptions(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield each queue that has a handler in this process or options, with handlers and types."""
    found = set()
    for each in handlers.all_handlers():
        for queue in handlers.allowed_queues(each, settings):
            found.add(queue)
            more = ", ..." if each.patterns[MOST_TYPES:] else ""
            yield queue, each.name, ", ".join(each.patterns[:MOST_TYPES]) + more or "(a task)"
    for queue in {settings.default_queue, *settings.queues} - found:
        yield queue, "-", "-"


def mistaken(name: str, known: Collection[str]) -> str:
    """Return a warning if `name` is not a known queue; empty if it is one, or a pattern.

    >>> mistaken("mial", ["mail", "default"])
    "no handler here names the queue 'mial', and it has no messages: did you mean 'mail'?"
    >>> mistaken("mail", ["mail"]), mistaken("mail.*", [])
    ('', '')
    """
    if name in known or "*" in name or "#" in name:
        return ""
    near = get_close_matches(name, known, 1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return f"no handler here names the queue {name!r}, and it has no messages{hint}"
