"""Delete rows older than their retention, and add up figures: chores that make no message due.

Each function does one piece and returns where the next one starts; None: it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import date, timedelta
from typing import Any

from psycopg.errors import CheckViolation

from django_mq.conf import Settings
from django_mq.executor import history_rules
from django_mq.executor.statements import within_transaction
from django_mq.states import GONE_AFTER
from django_mq.store import Cursor, chores, figures, history_days, operations, pruning
from django_mq.store.conditions import BEGINNING
from django_mq.store.queue_names import CHORES_ROW

logger = logging.getLogger("django_mq")

#: Rows that one piece removes, or walks over.
PIECE_ROWS = 1000
#: How long figures are kept, in seconds: by minute and worker, and by hour.
MINUTES_KEPT, HOURS_KEPT = 2 * 86400.0, 90 * 86400.0
#: Days created ahead, so that a fleet that pauses over a weekend finds its partitions.
DAYS_AHEAD = 3
#: Days that one piece looks at.
PIECE_DAYS = 50
#: Seconds between two warnings of the fleet that no days can be created.
WARN_EVERY = 3600.0


def pruner(
    what: str, retention: Callable[[Settings], float | None] = lambda settings: 0.0
) -> Callable[[Cursor, Settings, Any], Any]:
    """Return the chore that deletes `what` of `pruning.prune()`, by age if it has a retention."""

    def piece(cursor: Cursor, settings: Settings, at: Any) -> Any:
        if (oldest := retention(settings)) is None:
            return None
        return pruning.prune(cursor, what, older_than=oldest, limit=PIECE_ROWS, after=_since(at))

    return piece


def prune_operations(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete operations that ended longer than ATTEMPT_RETENTION ago."""
    if (oldest := settings.attempt_retention) is None:
        return None
    return operations.prune(cursor, older_than=oldest, after=at or 0, limit=PIECE_ROWS)


def prune_workers(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete the rows of workers that have been gone for a while."""
    oldest = 4 * GONE_AFTER.total_seconds()
    return chores.prune_workers(cursor, older_than=oldest, after=at or "", limit=PIECE_ROWS)


def prune_history(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Delete old rows that outlived the partition of their day, or had none."""
    return history_days.prune(cursor, limit=PIECE_ROWS, after=_since(at))


def maintain_days(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Create days ahead, and drop old days after `at`; return where the next piece resumes.

    Does nothing unless this login may act as the owner of the table: the rows then go to the
    default partition.
    """
    found = history_days.days(cursor)
    if not found.owned:
        return None
    if at is None and history_rules.is_used():
        _create_ahead(cursor, found)
    since = date.min if at is None else date.fromisoformat(at)
    old = [day for day in found.days if since < day < found.today]
    for day in old[:PIECE_DAYS]:
        with within_transaction(cursor):
            history_days.drop_day(cursor, day)
    return old[PIECE_DAYS - 1].isoformat() if len(old) > PIECE_DAYS else None


def _create_ahead(cursor: Cursor, found: history_days.Days) -> None:
    ahead = [found.today + timedelta(days=n) for n in range(DAYS_AHEAD + 1)]
    missing = [day for day in ahead if day not in found.days]
    if missing and history_days.is_too_large(cursor):
        _warn_of_size(cursor)
        return
    for day in missing:
        # Refused if a message ended on that day just now: its row is in the default partition.
        with suppress(CheckViolation), within_transaction(cursor):
            history_days.create_day(cursor, day, owner=found.owner if found.foreign else None)


def _warn_of_size(cursor: Cursor) -> None:
    """Warn that no days are created, on one worker of the fleet: nothing else changes that."""
    if not chores.take_warning(cursor, queue=CHORES_ROW, every=WARN_EVERY):
        return
    logger.warning(
        "no partitions are created for coming days of the history, because its default partition"
        " is larger than %.1f GiB: set it aside as docs/history.md (Retention) says",
        history_days.MAX_SCANNED_BYTES / 1024**3,
        extra={"event": "no_history_days"},
    )


def roll_up_figures(cursor: Cursor, settings: Settings, at: Any) -> Any:
    """Add up a finished hour of figures or, if none is left, delete old figures."""
    if figures.roll_up(cursor):
        return True
    pruned = figures.prune(cursor, minutes=MINUTES_KEPT, hours=HOURS_KEPT, limit=PIECE_ROWS)
    return True if pruned >= PIECE_ROWS else None


def _since(at: Any) -> str:
    """Return the time at which a walk resumes; older code stored other positions."""
    return at if isinstance(at, str) else BEGINNING
