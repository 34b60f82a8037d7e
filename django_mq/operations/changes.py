"""The changes that operators make to messages, in the caller's transaction.

Each returns the ids that it changed: messages in flight, or locked by another session, stay. If a
message may now run, the workers are rung after the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from django.db.backends.utils import CursorWrapper

from django_mq.conf import get_settings
from django_mq.outbox import notify
from django_mq.store import free_unique_ids
from django_mq.store import operators as store

Change = Callable[[CursorWrapper, Sequence[int]], list[int]]


def remove(
    cursor: CursorWrapper, ids: Sequence[int], *, waiting: bool, dead: bool, reason: str
) -> list[int]:
    """Delete waiting messages, dead ones or both; messages behind them proceed."""
    removed = store.remove(cursor, ids=ids, waiting=waiting, dead=dead, reason=reason)
    store.free_followers(cursor, removed)
    free_unique_ids.end_removed(cursor, removed)
    notify.ring_for_next(cursor.db, get_settings(), removed)
    return [row.id for row in removed]


def requeue(cursor: CursorWrapper, ids: Sequence[int], *, attempts: int = 1) -> list[int]:
    """Give dead letters at least `attempts` more attempts."""
    unique = free_unique_ids.reacquire(cursor, ids=ids)
    return _made_due(cursor, store.requeue(cursor, ids=ids, attempts=attempts, unique=unique))


def run_now(cursor: CursorWrapper, ids: Sequence[int]) -> list[int]:
    """Make messages due that wait for a time."""
    return _made_due(cursor, store.run_now(cursor, ids=ids))


def _made_due(cursor: CursorWrapper, ids: list[int]) -> list[int]:
    if ids:
        notify.ring_after_commit(cursor.db)
    return ids


#: By the name of the action.
CHANGES: dict[str, Change] = {
    "cancel": partial(remove, waiting=True, dead=False, reason="cancelled"),
    "discard": partial(remove, waiting=False, dead=True, reason="discarded"),
    "requeue": requeue,
    "run_now": run_now,
}
