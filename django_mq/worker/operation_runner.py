"""Carry out operations: the loop checks for one, and a thread takes its steps.

Any worker does this, whatever its queues. The lock on the operation's row decides which worker
takes a step, so workers may take turns. The thread's connection is open only while it works.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import psycopg

from django_mq.conf.error_logs import log_failure
from django_mq.executor.watchdog import Link
from django_mq.operations.changes import CHANGES
from django_mq.operations.steps import OperationStep, StepRefused, fail_step, take_step
from django_mq.outbox import notify
from django_mq.store import Cursor, operations
from django_mq.worker.wakeable_thread import WakeableThread

#: Seconds between two steps, so that an operator's statement can lock the row.
STEP_PAUSE = 0.02
#: Seconds until the next turn after a failed one.
AFTER_FAILURE = 5.0
#: Passing errors that another session causes: the same step is taken again.
TRANSIENT_ERRORS = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
)


class OperationRunner(WakeableThread):
    """Takes steps of operations while there are any.

    `on_freed()` is called, on this thread, when a message may run because of a step.
    """

    def __init__(
        self,
        alias: str,
        *,
        poll_interval: float,
        on_freed: Callable[[], None],
        on_turn: Callable[[], None],
        link: Link,
    ) -> None:
        super().__init__("operation_runner", alias, on_turn=on_turn, link=link)
        self._poll_interval = poll_interval
        self._on_freed = on_freed
        self._poll_at = float("-inf")

    def poll(self, cursor: Cursor) -> float:
        """Query for an operation, if it is time; return the seconds until the next poll."""
        now = monotonic()
        if now >= self._poll_at and not self.busy():
            self._poll_at = now + self._poll_interval
            if operations.any_open(cursor, CHANGES):
                self._wake.set()
        return max(0.0, self._poll_at - now) or self._poll_interval

    def work(self) -> None:
        """Take steps until no operation is open, or other workers hold all open operations."""
        with self.connected():
            while not self._ended.is_set() and (step := self._step()):
                if step.may_run:
                    self._on_freed()
                self._ended.wait(STEP_PAUSE)

    def log_error(self, error: Exception) -> None:
        log_failure("operation_runner_failed", error, "the operation runner failed")

    def on_failure(self, *, lost: bool) -> None:
        if not lost:
            self._poll_at = monotonic() + AFTER_FAILURE

    def _step(self) -> OperationStep | None:
        """Take a step; if the database refuses it permanently, the operation fails."""
        try:
            with self.block() as cursor:
                step = take_step(cursor)
                if step is not None and step.may_run:
                    notify.ring_after_commit(cursor.db)
                return step
        except StepRefused as refused:
            if isinstance(refused.error.__cause__, TRANSIENT_ERRORS) or not self.is_connected():
                raise refused.error from None
            with self.block() as cursor:
                fail_step(cursor, refused.id, refused.error)
            return OperationStep(0, may_run=False)
