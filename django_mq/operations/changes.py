"""The changes that operators make to messages, in the caller's transaction.

Messages in flight, or locked by another session, stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from django.db.backends.utils import CursorWrapper

from django_mq.conf import get_settings
from django_mq.store import free_unique_ids, message_changes


class Done(NamedTuple):
    """The `ids` that were changed. The caller rings the workers if a message may now run."""

    ids: list[int]
    may_run: bool


Change = Callable[[CursorWrapper, Sequence[int]], Done]


def remove(
    cursor: CursorWrapper, ids: Sequence[int], *, waiting: bool, dead: bool, reason: str
) -> Done:
    """Delete waiting messages, dead ones or both; messages behind them proceed."""
    removed = message_changes.remove(cursor, ids=ids, waiting=waiting, dead=dead, reason=reason)
    message_changes.free_followers(cursor, removed)
    free_unique_ids.end_removed(cursor, removed)
    settings = get_settings()
    return Done(
        [row.id for row in removed], any(settings.in_line(row.queue, row.key) for row in removed)
    )


def requeue(cursor: CursorWrapper, ids: Sequence[int], *, attempts: int = 1) -> Done:
    """Give dead letters at least `attempts` more attempts."""
    unique = free_unique_ids.reacquire(cursor, ids=ids)
    made_due = message_changes.requeue(cursor, ids=ids, attempts=attempts, unique=unique)
    return Done(made_due, bool(made_due))


def run_now(cursor: CursorWrapper, ids: Sequence[int]) -> Done:
    """Make messages due that wait for a time."""
    made_due = message_changes.run_now(cursor, ids=ids)
    return Done(made_due, bool(made_due))


#: By the name of the action.
CHANGES: dict[str, Change] = {
    "cancel": partial(remove, waiting=True, dead=False, reason="cancelled"),
    "discard": partial(remove, waiting=False, dead=True, reason="discarded"),
    "requeue": requeue,
    "run_now": run_now,
}
REMOVING_ACTIONS = ("cancel", "discard")
#: The actions on heads of lines: only a dead head waits for an operator.
HEAD_ACTIONS = ("requeue", "discard")
