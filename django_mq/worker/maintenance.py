"""Run chores on a thread of their own, so that nothing else waits for them.

Its connection is open only while they run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from django_mq.executor.connections import LOST
from django_mq.executor.statements import Statements
from django_mq.worker import chores

if TYPE_CHECKING:
    from django_mq.conf import Settings
    from django_mq.executor.watchdog import Link
    from django_mq.store import Cursor

logger = logging.getLogger("django_mq")

#: Seconds that a stopping worker waits for the statement that it cancelled.
LAST = 1.0


class Maintenance(threading.Thread):
    """Does the chores of the fleet when it is this worker's turn."""

    def __init__(self, alias: str, settings: Settings, *, link: Link | None = None) -> None:
        super().__init__(name="mq-maintenance", daemon=True)
        self._settings = settings
        self._statements = Statements(alias, limits=chores.LIMITS, link=link)
        self._wake = threading.Event()
        self._cursor: Cursor | None = None
        self._ending = False

    def on_heartbeat(self, since: float | None) -> None:
        """Wake up if chores are due: the fleet last did them `since` seconds ago (None: never)."""
        if since is None or since >= chores.EVERY:
            self._wake.set()

    def run(self) -> None:
        while self._wake.wait() and not self._ending:
            self._wake.clear()
            self.take_turn()

    def take_turn(self) -> None:
        """Do what is due, unless another worker has taken the turn; raises nothing."""
        statements = self._statements
        try:
            self._cursor = cursor = statements.cursor()
            chores.run(cursor, self._settings, ending=lambda: self._ending, allow=statements.allow)
        except LOST as error:  # the loop reports it, and waits for the database
            logger.debug("chores put off: %s", error)
        except Exception:
            logger.exception("chores failed", extra={"event": "chores_failed"})
        finally:
            self._cursor = None
            statements.close()

    def end(self) -> None:
        """Cancel the running statement, and begin nothing more."""
        self._ending = True
        self._wake.set()
        if not self.is_alive():
            return
        if (cursor := self._cursor) is not None:
            with contextlib.suppress(*LOST):
                cursor.connection.cancel_safe(timeout=LAST)
        self.join(LAST)
