"""Run chores on a thread of their own, so that nothing else waits for them.

Its connection is open only while they run.
"""

from __future__ import annotations

import contextlib

from django_mq.conf import Settings
from django_mq.conf.error_logs import log_failure
from django_mq.executor.statements import Statements
from django_mq.executor.watchdog import Link
from django_mq.store import Cursor
from django_mq.store.server_errors import LOST
from django_mq.worker import chores
from django_mq.worker.wakeable_thread import STOP_SECONDS, WakeableThread


class Maintenance(WakeableThread):
    """Does the chores of the fleet when it is this worker's turn."""

    def __init__(self, alias: str, settings: Settings, *, link: Link) -> None:
        super().__init__("maintenance", alias, link=link)
        self._settings = settings
        self._statements = Statements(alias, limits=chores.LIMITS, link=link)
        self._cursor: Cursor | None = None

    def on_heartbeat(self, since: float | None) -> None:
        """Wake up if chores are due: the fleet last did them `since` seconds ago (None: never)."""
        if since is None or since >= chores.TURN_SECONDS:
            self._wake.set()

    def work(self) -> None:
        """Do what is due, unless another worker has taken the turn."""
        statements = self._statements
        try:
            self._cursor = cursor = statements.cursor()
            chores.run(cursor, self._settings, ending=self._ended.is_set, allow=statements.allow)
        finally:
            self._cursor = None
            statements.close()

    def log_error(self, error: Exception) -> None:
        log_failure("maintenance_failed", error, "maintenance failed")

    def end(self) -> None:
        """Cancel the running statement, and begin nothing more."""
        self._ended.set()
        if self.is_alive() and (cursor := self._cursor) is not None:
            with contextlib.suppress(*LOST):
                cursor.connection.cancel_safe(timeout=STOP_SECONDS)
        super().end()
