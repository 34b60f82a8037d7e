"""Delete what is older than its retention, piece by piece: chores that free nothing.

Each function does one piece and returns where the next one starts; None: it is done.
"""

from __future__ import annotations

from typing import Any

from django_mq.conf import Settings
from django_mq.executor.statements import within_transaction
from django_mq.states import GONE_AFTER
from django_mq.store import Cursor, chores, kept_results, operations
from django_mq.store import put_aside as aside

#: Rows that one piece removes, or walks over.
PIECE = 1000


def forget_attempts(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete failed attempts older than ATTEMPT_RETENTION."""
    if (oldest := settings.attempt_retention) is None:
        return None
    with within_transaction(cursor):
        return _again(chores.forget_attempts(cursor, older_than=oldest, limit=PIECE))


def forget_results(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete results older than RESULT_RETENTION."""
    if (oldest := settings.result_retention) is None:
        return None
    with within_transaction(cursor):
        return _again(chores.forget_results(cursor, older_than=oldest, limit=PIECE))


def forget_kept(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete results whose own time is over."""
    with within_transaction(cursor):
        return _again(kept_results.forget_kept(cursor, limit=PIECE))


def forget_quiet(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Free unique ids whose quiet time is over."""
    with within_transaction(cursor):
        return _again(aside.forget_quiet(cursor, limit=PIECE))


def forget_operations(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete operations that ended longer than ATTEMPT_RETENTION ago."""
    if (oldest := settings.attempt_retention) is None:
        return None
    with within_transaction(cursor):
        return operations.forget(cursor, older_than=oldest, after=at or 0, limit=PIECE)


def forget_workers(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete the rows of workers that have been gone for a while."""
    oldest = 4 * GONE_AFTER.total_seconds()
    with within_transaction(cursor):
        return chores.forget_workers(cursor, older_than=oldest, after=at or "", limit=PIECE)


def _again(count: int) -> Any:
    """Return a position if the piece was full; the next one starts behind the removed rows."""
    return True if count >= PIECE else None
