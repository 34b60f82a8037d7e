"""Vacuum the short-lived tables when a busy fleet cannot wait for autovacuum.

Autovacuum comes once per `autovacuum_naptime`, a minute by default. By then, at tens of thousands
of messages per second, a table has grown by more than a gigabyte of dead rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter

from django_mq.store import Cursor
from django_mq.store.vacuum import Versions, vacuum, versions

logger = logging.getLogger("django_mq")

#: The number of dead row versions, two per message, below which autovacuum is early enough.
MIN_DEAD_ROWS = 100_000
#: The minimum ratio of dead to live rows: a vacuum walks over the indexes of all live rows.
MIN_DEAD_RATIO = 0.1


def vacuum_due(cursor: Cursor, kept: Mapping[str, object]) -> dict[str, int]:
    """Vacuum the tables that are due; return how many dead row versions were left in each.

    Tables that this login may not vacuum are left out.

    `kept` is what the fleet's last call returned. If a vacuum left dead rows, because a session
    holds a snapshot, their number must double before the next attempt: autovacuum may have removed
    them by then.
    """
    found = {table: each for table, each in versions(cursor).items() if each.may_vacuum}
    left = {table: min(each.dead, _number(kept.get(table))) for table, each in found.items()}
    due = [table for table, each in found.items() if is_due(each, kept=left[table])]
    left.update((table, found[table].dead) for table in due)
    for table in due:
        began = perf_counter()
        try:
            vacuum(cursor, table)
        except Exception as error:  # the vacuum is only a help: autovacuum comes anyway
            logger.debug("could not vacuum: %s", error, extra={"event": "vacuum_failed"})
            break
        left[table] = versions(cursor)[table].dead
        logger.debug(
            "vacuumed %s in %.2f s: %d dead row versions left",
            table,
            perf_counter() - began,
            left[table],
            extra={"event": "vacuumed"},
        )
    return {table: dead for table, dead in left.items() if dead}


def _number(stored: object) -> int:
    """Return a stored number; another program may have written any value."""
    return stored if isinstance(stored, int) else 0


def is_due(found: Versions, *, kept: int) -> bool:
    """Return whether enough rows are dead, and at least twice the `kept` rows of the last vacuum.

    >>> is_due(Versions(99_999, 0), kept=0), is_due(Versions(100_000, 1_000_000), kept=0)
    (False, True)
    >>> is_due(Versions(100_000, 1_000_001), kept=0), is_due(Versions(100_000, 0), kept=50_001)
    (False, False)
    """
    return found.dead >= max(MIN_DEAD_ROWS, MIN_DEAD_RATIO * found.live, 2 * kept)
