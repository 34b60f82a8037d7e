"""Vacuum the short-lived tables when a busy fleet cannot wait for the server's own vacuum.

That comes once in `autovacuum_naptime`, a minute unless the server is told otherwise: at tens of
thousands of messages a second more than a gigabyte lies dead by then, which all that comes next
is written behind.
"""

from __future__ import annotations

import logging
import threading
from time import perf_counter
from typing import TYPE_CHECKING

from django_mq.store.vacuum import Versions, vacuum, versions
from django_mq.worker.database import LOST, Statements

if TYPE_CHECKING:
    from django_mq.store import Cursor

logger = logging.getLogger("django_mq")

#: Dead row versions, two for each message: with fewer, the server's own vacuum is early enough.
MANY = 100_000
#: Of what lives, so much must be dead: a vacuum walks over the indexes of all of it.
SHARE = 0.1
#: Seconds that the end of the worker waits for a vacuum which it has cancelled.
LAST = 1.0


class Vacuuming:
    """Vacuums on a connection and a thread of its own: nothing may wait for it.

    What a vacuum could not remove, since somebody holds a snapshot, must have doubled before the
    next one tries: by then the server's own may have.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._thread: threading.Thread | None = None
        self._cursor: Cursor | None = None
        self._ended = False
        self._kept: dict[str, int] = {}

    def tend(self, cursor: Cursor) -> None:
        """Begin a vacuum if one is due; `cursor` is only asked what is dead."""
        if self._ended or (self._thread and self._thread.is_alive()):
            return
        found = versions(cursor)
        for table, (dead, _) in found.items():
            self._kept[table] = min(dead, self._kept.get(table, 0))
        due = [table for table, each in found.items() if is_due(each, kept=self._kept[table])]
        if due:
            self._kept.update((table, found[table].dead) for table in due)
            self._thread = threading.Thread(
                target=self._run, args=(due,), name="mq-vacuum", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Cancel what runs, and begin nothing more."""
        self._ended = True
        thread, cursor = self._thread, self._cursor
        if thread is None or not thread.is_alive():
            return
        if cursor is not None:
            try:
                cursor.connection.cancel_safe(timeout=LAST)
            except LOST:
                logger.debug("could not cancel a vacuum: the database is away")
        thread.join(LAST)

    def _run(self, tables: list[str]) -> None:
        statements = Statements(self._alias)
        try:
            self._cursor = cursor = statements.cursor()
            for table in tables:
                if self._ended:
                    return
                began = perf_counter()
                vacuum(cursor, table)
                left = self._kept[table] = versions(cursor)[table].dead
                logger.debug(
                    "vacuumed %s in %.2f s: %d dead row versions left",
                    table,
                    perf_counter() - began,
                    left,
                    extra={"event": "vacuumed"},
                )
        except Exception as error:  # it is help, not duty: the server's own vacuum comes
            logger.debug("could not vacuum: %s", error, extra={"event": "vacuum_failed"})
        finally:
            self._cursor = None
            statements.close()


def is_due(found: Versions, *, kept: int) -> bool:
    """Say whether many are dead, for what lives, and twice as many as the last vacuum left.

    >>> is_due(Versions(99_999, 0), kept=0), is_due(Versions(100_000, 1_000_000), kept=0)
    (False, True)
    >>> is_due(Versions(100_000, 1_000_001), kept=0), is_due(Versions(100_000, 0), kept=50_001)
    (False, False)
    """
    return found.dead >= max(MANY, SHARE * found.live, 2 * kept)
