"""The names of the known queues, and a warning about one that may be misspelled."""

from __future__ import annotations

from collections.abc import Collection

from django.db import connections

from django_mq import handlers
from django_mq.conf import alias_of, get_settings
from django_mq.policy.similar_names import similar
from django_mq.store import Cursor, queue_names


def names(*, using: str | None = None) -> list[str]:
    """Return the names of the known queues, sorted.

    A queue is known when it has messages or an owner, is paused, limited or backing off, appears in
    the settings, or has a handler in this process.
    """
    with connections[alias_of(using)].cursor() as cursor:
        return read_names(cursor)


def read_names(cursor: Cursor) -> list[str]:
    """Return the same as `names()`, read on `cursor`."""
    return sorted(queue_names.names(cursor) | _declared())


def warning_if_unknown(cursor: Cursor, name: str) -> str:
    """Return a warning if `name` is not a known queue, or an empty text.

    The database is not asked about a queue that the settings or a handler name.
    """
    return "" if name in _declared() else unknown_queue_warning(name, read_names(cursor))


def _declared() -> set[str]:
    """Return the queues that appear in the settings, or have a handler in this process."""
    settings = get_settings()
    found = {settings.default_queue, *settings.queues}
    for each in handlers.all_handlers():
        found.update(handlers.allowed_queues(each, settings))
    return found


def unknown_queue_warning(name: str, known: Collection[str]) -> str:
    """Return a warning if `name` is not a known queue, or an empty text.

    >>> unknown_queue_warning("mial", ["mail", "default"])
    "no handler here names the queue 'mial', and it has no messages: did you mean 'mail'?"
    >>> unknown_queue_warning("mail", ["mail"])
    ''
    """
    if name in known:
        return ""
    text = f"no handler here names the queue {name!r}, and it has no messages"
    near = similar(name, known, most=1)
    return f"{text}: did you mean {near[0]!r}?" if near else text
