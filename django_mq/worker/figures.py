"""The chore of the figures: add up finished hours, and forget old figures."""

from __future__ import annotations

from django_mq.executor.statements import within_transaction
from django_mq.store import Cursor, figures

#: How long figures are kept, in seconds: by minute and worker, and by hour.
MINUTES_KEPT, HOURS_KEPT = 2 * 86400.0, 90 * 86400.0


def tend(cursor: Cursor, limit: int) -> bool:
    """Add up one hour or, if none is left, forget `limit` rows; return whether work is left."""
    with within_transaction(cursor):
        if figures.roll_up(cursor):
            return True
    with within_transaction(cursor):
        minutes = figures.forget_minutes(cursor, older_than=MINUTES_KEPT, limit=limit)
        hours = figures.forget_hours(cursor, older_than=HOURS_KEPT, limit=limit)
    return max(minutes, hours) >= limit
