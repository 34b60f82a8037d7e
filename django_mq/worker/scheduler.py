"""Broadcast by the clock: the loop looks when a schedule is due, a thread broadcasts it.

Any worker does this, whatever its queues. The row's own lock decides which one broadcasts, so
nothing is agreed on beforehand. The thread's connection is open only while it works.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import random
from time import monotonic
from typing import TYPE_CHECKING

from django.db import connections, transaction
from psycopg import IsolationLevel

from django_mq.executor.connections import LOST, plain_connection_as
from django_mq.handlers import all_schedules
from django_mq.handlers.cron import can_read_cron
from django_mq.schedules.declaring import FRESH, declare_all, keep_declared, retire
from django_mq.schedules.firing import fire_due
from django_mq.store import schedules as store
from django_mq.store.limits import Limits, set_local

if TYPE_CHECKING:
    from django_mq.conf import Settings
    from django_mq.executor.watchdog import Link
    from django_mq.store import Cursor

logger = logging.getLogger("django_mq")

#: The workers of a fleet look up to this many seconds apart when a schedule is due: the first one
#: broadcasts it, and the others see that it has moved on.
SPREAD = 0.2
#: Seconds until the next turn while something stays due, and after a turn that failed.
AGAIN, AFTER_FAILURE = 1.0, 5.0
#: The limits of its statements.
LIMITS = Limits(lock=1.0)
#: Seconds that a stopping worker waits for the current transaction.
LAST = 1.0


class Scheduler(threading.Thread):
    """Stores the schedules of this process's code, and broadcasts those of all that are due.

    `on_fired()` is called when messages were broadcast, `on_turn()` after every turn: both on this
    thread.
    """

    def __init__(
        self,
        alias: str,
        settings: Settings,
        *,
        on_fired: Callable[[], None],
        on_turn: Callable[[], None],
        link: Link | None = None,
    ) -> None:
        super().__init__(name="mq-scheduler", daemon=True)
        self._alias = alias
        self._link = link
        self._settings = settings
        self._poll = settings.poll_interval
        self._on_fired = on_fired
        self._on_turn = on_turn
        # By `monotonic()`. The thread sets the second to 0 to make the loop look anew.
        self._looked_at = float("-inf")
        self._due_at = float("inf")
        self._rests_until = float("-inf")
        self._reads_cron = can_read_cron()
        self._declare_at = 0.0 if all_schedules() else monotonic() + FRESH
        self._stored = not all_schedules()
        self._wake = threading.Event()
        self._working = False
        self._ending = False
        if not self._stored:
            self._wake.set()

    def tend(self, cursor: Cursor) -> float:
        """Look when a schedule is due, if it is time to; return the seconds until the next look.

        The loop calls it on each round: it looks once per poll interval, and when one is due.
        """
        now = monotonic()
        if now >= self._due_at or now >= self._looked_at + self._poll / 2:
            self._looked_at = now
            wait = store.next_due(cursor, cron=self._reads_cron)
            if wait is None:
                self._due_at = float("inf")
            elif wait > 0:
                self._due_at = now + wait + SPREAD * random()  # noqa: S311  (no secret)
            elif now < self._rests_until:
                self._due_at = self._rests_until
            else:
                self._due_at = now + AGAIN
                self._wake.set()
        return max(0.0, min(self._due_at, self._looked_at + self._poll) - now)

    def busy(self) -> bool:
        """Return whether a turn runs or is about to: it may broadcast."""
        return self._wake.is_set() or self._working

    def run(self) -> None:
        while not self._ending:
            self._wake.wait(max(0.0, self._declare_at - monotonic()))
            self._working = True
            self._wake.clear()
            if not self._ending:
                self.take_turn()
            self._working = False
            self._on_turn()

    def take_turn(self) -> None:
        """Declare, if it is time to, and broadcast what is due; raises nothing."""
        try:
            with plain_connection_as(self._alias, self._link) as plain:
                plain.connect()
                # Whatever the alias sets: a row that another worker moved on is no longer due.
                plain.connection.isolation_level = IsolationLevel.READ_COMMITTED
                if monotonic() >= self._declare_at:
                    self._declare()
                self._fire()
        except LOST as error:  # the loop reports it, and waits for the database
            logger.debug("schedules put off: %s", error)
            self._declare_at = max(self._declare_at, monotonic() + AGAIN)
        except Exception:
            logger.exception("schedules failed", extra={"event": "schedules_failed"})
            self._rests_until = monotonic() + AFTER_FAILURE
            self._declare_at = max(self._declare_at, self._rests_until)

    def _declare(self) -> None:
        """Store what this code declares, and retire what none does; again later, or soon if a row
        was locked."""
        try:
            if self._stored:
                keep_declared(self._block, self._settings)
            else:
                declare_all(self._block, self._settings)
                self._stored = True
            retire(self._block)
        except LOST as error:
            driver = connections[self._alias].connection
            if driver is None or driver.closed:
                raise
            logger.debug("schedules not declared: %s", error)
            self._declare_at = monotonic() + AGAIN
        else:
            self._declare_at = monotonic() + FRESH * (0.9 + 0.2 * random())  # noqa: S311
        self._due_at = 0.0

    def _fire(self) -> None:
        """Broadcast what is due, in transactions of bounded size, until nothing is left."""
        position: store.Position | None = store.FIRST
        fired = 0
        while position is not None and not self._ending:
            with self._block() as cursor:
                done = fire_due(cursor, self._alias, after=position)
            fired += done.broadcasts
            position = done.after
            if done.broadcasts:
                self._on_fired()
        if fired:
            self._due_at = 0.0  # others may be due sooner than the loop knows

    @contextmanager
    def _block(self) -> Iterator[Cursor]:
        """Give a cursor in a transaction with limits that override those of the role."""
        with transaction.atomic(using=self._alias), connections[self._alias].cursor() as cursor:
            cursor.execute(set_local(LIMITS))
            yield cursor

    def end(self) -> None:
        """Begin nothing more, and wait a moment for the current transaction."""
        self._ending = True
        self._wake.set()
        if self.is_alive():
            self.join(LAST)
