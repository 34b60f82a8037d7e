"""Vacuum the short-lived tables when a busy fleet cannot wait for autovacuum.

Autovacuum comes once per `autovacuum_naptime`, a minute by default. At tens of thousands of
messages per second a table has grown by more than a gigabyte of dead rows by then.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

from django_mq.store.vacuum import Versions, vacuum, versions

if TYPE_CHECKING:
    from django_mq.store import Cursor

logger = logging.getLogger("django_mq")

#: Dead row versions, two per message, below which autovacuum is early enough.
MANY = 100_000
#: The least share of dead to live rows: a vacuum walks over the indexes of all live ones.
SHARE = 0.1


class Vacuuming:
    """Vacuums tables when that is due.

    If a vacuum left dead rows, since a session holds a snapshot, their number must double before
    the next try: autovacuum may have removed them by then.
    """

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}

    def tend(self, cursor: Cursor) -> None:
        """Vacuum the tables that are due."""
        found = versions(cursor)
        for table, (dead, _) in found.items():
            self._kept[table] = min(dead, self._kept.get(table, 0))
        due = [table for table, each in found.items() if is_due(each, kept=self._kept[table])]
        self._kept.update((table, found[table].dead) for table in due)
        for table in due:
            began = perf_counter()
            try:
                vacuum(cursor, table)
            except Exception as error:  # it only helps: autovacuum comes anyway
                logger.debug("could not vacuum: %s", error, extra={"event": "vacuum_failed"})
                return
            left = self._kept[table] = versions(cursor)[table].dead
            logger.debug(
                "vacuumed %s in %.2f s: %d dead row versions left",
                table,
                perf_counter() - began,
                left,
                extra={"event": "vacuumed"},
            )


def is_due(found: Versions, *, kept: int) -> bool:
    """Say whether enough rows are dead, and at least twice the `kept` of the last vacuum.

    >>> is_due(Versions(99_999, 0), kept=0), is_due(Versions(100_000, 1_000_000), kept=0)
    (False, True)
    >>> is_due(Versions(100_000, 1_000_001), kept=0), is_due(Versions(100_000, 0), kept=50_001)
    (False, False)
    """
    return found.dead >= max(MANY, SHARE * found.live, 2 * kept)
