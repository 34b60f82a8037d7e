"""Broadcast schedules: the loop finds out when one is due, and a thread broadcasts it.

Any worker does this, whatever its queues; a schedule of code is for workers that declare it. The
lock on the schedule's row decides which of them broadcasts it, so they need no coordination. The
thread's connection is open only while it works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import random
from time import monotonic

from django_mq.conf import Settings
from django_mq.conf.error_logs import log_failure
from django_mq.executor.watchdog import Link
from django_mq.handlers import all_schedules
from django_mq.handlers.cron import can_read_cron
from django_mq.outbox.schedules.declaring import (
    REDECLARE_INTERVAL,
    declare_all,
    keep_declared,
    own_types,
    retire,
)
from django_mq.outbox.schedules.firing import fire_due
from django_mq.store import Cursor, schedules
from django_mq.store.server_errors import LOST
from django_mq.worker.wakeable_thread import WakeableThread

logger = logging.getLogger("django_mq")

#: When a schedule is due, the workers of a fleet look up to this many seconds apart: the first one
#: broadcasts it, and the others see that the schedule has moved on.
JITTER = 0.2
#: Seconds until the next turn while something stays due, and after a turn that failed.
RETRY_DELAY, AFTER_FAILURE = 1.0, 5.0


class Scheduler(WakeableThread):
    """Stores the schedules of this process's code, and broadcasts every schedule that is due.

    The process of a worker that has just started `declares`: its schedules replace those that other
    versions of the code have stored. One that replaces a process stores only what is missing.
    `on_declared()` is called, on this thread, once all are stored, and `on_fired()` when messages
    were broadcast.
    """

    def __init__(
        self,
        alias: str,
        settings: Settings,
        *,
        declares: bool,
        on_declared: Callable[[], None],
        on_fired: Callable[[], None],
        on_turn: Callable[[], None],
        link: Link,
    ) -> None:
        super().__init__("scheduler", alias, on_turn=on_turn, link=link)
        self._settings = settings
        self._poll_interval = settings.poll_interval
        self._on_declared = on_declared
        self._on_fired = on_fired
        # By `monotonic()`. The thread sets `_due_at` to 0 to make the loop query again.
        self._polled_at = float("-inf")
        self._due_at = float("inf")
        self._rests_until = float("-inf")
        self._declare_at = 0.0
        self._reads_cron = can_read_cron()
        # A process that declares no schedules takes its first turn when the loop finds one: that
        # disables it before it is broadcast, if no process has declared it for a day.
        own = {each.name for each in all_schedules()}
        self._takes_turns = bool(own)
        self._to_store = own if declares else set[str]()
        if own:
            self._wake.set()

    def poll(self, cursor: Cursor) -> float:
        """Query when a schedule is due, if it is time; return the seconds until the next poll.

        The loop calls it each round; it queries once or twice per poll interval and at due times.
        """
        now = monotonic()
        if now >= self._due_at or now >= self._polled_at + self._poll_interval / 2:
            self._polled_at = now
            # Before its first turn, a process without schedules looks for those of other code, too.
            own = own_types() if self._takes_turns else None
            wait = schedules.next_due(cursor, cron=self._reads_cron, own=own)
            if wait is not None and not self._takes_turns:
                self._wake.set()
            if wait is None:
                self._due_at = float("inf")
            elif wait > 0:
                self._due_at = now + wait + JITTER * random()  # noqa: S311  (no secret)
            elif now < self._rests_until:
                self._due_at = self._rests_until
            else:
                self._due_at = now + RETRY_DELAY
                self._wake.set()
        return max(0.0, min(self._due_at, self._polled_at + self._poll_interval) - now)

    def next_turn_in(self) -> float | None:
        if not self._takes_turns:
            return None
        return max(0.0, self._declare_at - monotonic())

    def work(self) -> None:
        """Declare schedules, if it is time to, and broadcast those that are due."""
        self._takes_turns = True
        with self.connected():
            if monotonic() >= self._declare_at:
                self._declare()
            self._fire()

    def log_error(self, error: Exception) -> None:
        log_failure("scheduler_failed", error, "scheduler failed")

    def on_failure(self, *, lost: bool) -> None:
        again_at = monotonic() + (RETRY_DELAY if lost else AFTER_FAILURE)
        self._declare_at = max(self._declare_at, again_at)
        if not lost:
            self._rests_until = again_at

    def _declare(self) -> None:
        """Store the schedules that this code declares, and retire those that no code declares.

        The next declaration is in an hour, or soon if rows were locked: then only of those, so that
        it does not undo what a newer version has declared meanwhile.
        """
        try:
            if self._to_store:
                self._to_store = declare_all(self.block, self._settings, only=self._to_store)
            else:
                self._to_store = keep_declared(self.block, self._settings)
            if not self._to_store:
                self._on_declared()
            retire(self.block)
        except LOST as error:
            if not self.is_connected():
                raise
            logger.debug("schedules not declared: %s", error)
            self._declare_at = monotonic() + RETRY_DELAY
        else:
            wait = REDECLARE_INTERVAL * (0.9 + 0.2 * random())  # noqa: S311
            self._declare_at = monotonic() + (RETRY_DELAY if self._to_store else wait)
        self._due_at = 0.0

    def _fire(self) -> None:
        """Broadcast due schedules, in transactions of bounded size, until none is left."""
        position: schedules.Position | None = schedules.FIRST
        fired = 0
        while position is not None and not self._ended.is_set():
            with self.block() as cursor:
                done = fire_due(cursor, self._alias, after=position)
            fired += done.broadcasts
            position = done.after
            if done.broadcasts:
                self._on_fired()
        if fired:
            self._due_at = 0.0  # others may be due sooner than the loop knows
