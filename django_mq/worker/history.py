"""Keep the days of the history: create them ahead, drop them when nothing in them is kept."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from django_mq.conf import Settings
from django_mq.executor import history
from django_mq.executor.statements import within_transaction
from django_mq.store import Cursor
from django_mq.store import history_days as store

#: Days created ahead, so that a fleet that stops over a weekend finds its partitions.
AHEAD = 3
#: Days that one piece looks at, and rows that one piece deletes.
WALK, PIECE = 50, 1000


def forget(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete old rows that are in no partition of a day; return a position if there may be more."""
    with within_transaction(cursor):
        return True if store.forget(cursor, limit=PIECE) >= PIECE else None


def tend(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Create days ahead, and drop old days after `at`; return where the next piece resumes.

    Does nothing unless this login owns the table: the rows then go to the default partition.
    """
    found = store.days(cursor)
    if not found.owned:
        return None
    if at is None and history.is_used():
        _create_ahead(cursor, found)
    since = date.min if at is None else date.fromisoformat(at)
    old = [day for day in found.days if since < day < found.today]
    for day in old[:WALK]:
        with within_transaction(cursor):
            store.drop_day(cursor, day)
    return old[WALK - 1].isoformat() if len(old) > WALK else None


def _create_ahead(cursor: Cursor, found: store.Days) -> None:
    for n in range(AHEAD + 1):
        day = found.today + timedelta(days=n)
        if day not in found.days:
            with within_transaction(cursor):
                store.create_day(cursor, day, owner=found.owner if found.foreign else None)
