"""Renew leases, and write heartbeat and figures, on a thread and a connection of their own.

The thread must not wait for the rest of the process. It logs nothing and sends no signal, since a
log handler or a receiver may block, and its connection runs no other statements.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg
from psycopg.errors import LockNotAvailable

from django_mq.conf.error_logs import traced
from django_mq.executor import worker_totals
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.outage import reason_of
from django_mq.executor.statements import Statements
from django_mq.executor.watchdog import ConnectionStalled, Link
from django_mq.store import Cursor, figures, leases, queue_backoff
from django_mq.store.limits import STATEMENT_SECONDS, Limits
from django_mq.store.server_errors import LOST
from django_mq.worker.lease_renewal import LeaseRenewal
from django_mq.worker.step_times import KeeperStep, StepTimes

logger = logging.getLogger("django_mq")

#: The longest time between two heartbeats, in seconds.
HEARTBEAT_SECONDS = 10.0
#: The minimum number of seconds between two heartbeats, however often one is requested.
MIN_HEARTBEAT_SECONDS = 0.5
#: The longest wait, in seconds, before a failed step is tried again. It is short, so that after an
#: outage the leases are renewed before other workers look for lapsed ones.
MAX_RETRY_WAIT = 1.0
#: Seconds between two reports of failed renewals.
REPORT_EVERY = 5.0
#: The limit of one statement, in seconds, or a sixth of the shortest lease if that is more. If a
#: connection hangs, there is then still time to renew the leases on a new one.
RENEWAL_STATEMENT_SECONDS = 1.0
#: Seconds that a heartbeat, or the renewal of a probe, waits for a lock on a whole table, such as a
#: migration takes. Locked rows are skipped.
HEARTBEAT_LOCK_SECONDS = 0.2


class HeartbeatLocked(psycopg.OperationalError):
    """A heartbeat was not stored, because an earlier statement of this process has its row."""


def beat_interval(shortest_lease: float) -> float:
    """Return the seconds between two heartbeats; `shortest_lease` is in seconds.

    >>> beat_interval(30.0), beat_interval(3.0)
    (10.0, 1.0)
    """
    return min(shortest_lease / 3, HEARTBEAT_SECONDS)


class LeaseKeeper(threading.Thread):
    """Renews the leases of unsettled messages; writes the heartbeat and figures of this process.

    `heartbeat()` returns the columns to write. After each heartbeat, `on_heartbeat(seconds)` is
    called with the seconds since the fleet last did its chores (None: never), and `on_commands`
    with the commands for this worker; neither may block. `probes()` returns queue and claimer of
    the probes that run here.
    """

    def __init__(
        self,
        *,
        alias: str,
        worker: str,
        local_queue: LocalQueue,
        lease_of: Callable[[str], float],
        shortest_lease: float,
        heartbeat: Callable[[], dict[str, Any]],
        on_heartbeat: Callable[[float | None], None],
        on_commands: Callable[[Sequence[leases.Command]], None],
        probes: Callable[[], Iterable[tuple[str, str]]],
        link: Link,
    ) -> None:
        super().__init__(name="mq-lease-keeper", daemon=True)
        self._worker = worker
        self._lease_of = lease_of
        #: Seconds between two renewals.
        self.renew_interval = shortest_lease / 3
        #: Seconds between two heartbeats, at least one per renewal: the heartbeat keeps messages
        #: whose rows handlers have locked.
        self.beat_interval = beat_interval(shortest_lease)
        #: How many steps have ended, whether or not they succeeded: a sign that the thread moves.
        self.steps = 0
        #: How many heartbeats were stored.
        self.beats = 0
        #: Whether a statement of this thread got no answer, and no heartbeat was stored since: its
        #: COMMIT may wait for a synchronous standby, without a limit, while queries are answered.
        self.commits_hang = False
        self._max_retry_wait = min(MAX_RETRY_WAIT, shortest_lease / 6)
        self._heartbeat = heartbeat
        self._on_heartbeat = on_heartbeat
        self._on_commands = on_commands
        self._probes = probes
        seconds = min(STATEMENT_SECONDS, max(RENEWAL_STATEMENT_SECONDS, shortest_lease / 6))
        self._statements = Statements(alias, limits=Limits(seconds, seconds), link=link)
        self._renewal = LeaseRenewal(self._statements, local_queue.unsettled, lease_of=lease_of)
        self._wake = threading.Event()
        self._ending = self._heartbeat_requested = self._figures_requested = False
        self._leaves = True
        # Whether the last heartbeat may have taken commands without an answer, and the ids of the
        # commands that arrived.
        self._unconfirmed = False
        self._received: list[int] = []
        self._last_error: Exception | None = None
        self._error_recorded_at = self._beat_at = float("-inf")

    def end(self, *, leaves: bool = True) -> None:
        """End the thread. Remove the heartbeat of this worker if it `leaves` nothing that runs.

        Otherwise the heartbeat protects what the process holds until a sibling has settled that.
        """
        self._leaves = leaves
        self._ending = True
        self._wake.set()

    def request_heartbeat(self) -> None:
        """Write the heartbeat soon: it also reads commands for this worker. From any thread."""
        self._heartbeat_requested = True
        self._wake.set()

    def request_figures(self) -> None:
        """Store the figures soon. From any thread."""
        self._figures_requested = True
        self._wake.set()

    def report(self) -> None:
        """Log the last failure to renew, if any; call this from another thread."""
        error, self._last_error = self._last_error, None
        if error is not None:
            logger.warning(
                "could not renew leases or heartbeat (%s); trying again",
                reason_of(error),
                exc_info=None if isinstance(error, LOST) else traced(error),
                extra={"event": "renewal_failed"},
            )

    def run(self) -> None:
        every = {
            KeeperStep.RENEWAL: self.renew_interval,
            KeeperStep.HEARTBEAT: self.beat_interval,
            KeeperStep.FIGURES: HEARTBEAT_SECONDS,
        }
        times = StepTimes(every, max_retry_wait=self._max_retry_wait)
        try:
            while not self._ending:
                self._take_due_steps(times)
                self._wake.wait(times.seconds_left(monotonic()))
                self._wake.clear()  # before reading the flags: a caller sets its flag, then this
                if self._heartbeat_requested and not self._ending:
                    self._heartbeat_requested = False
                    # Every role that can log in may NOTIFY, and must not be able to keep this
                    # thread busy.
                    times.pull_forward(KeeperStep.HEARTBEAT, self._beat_at + MIN_HEARTBEAT_SECONDS)
                if self._figures_requested:
                    self._figures_requested = False
                    times.pull_forward(KeeperStep.FIGURES, monotonic())
            self._succeeds(self._write_figures)
            if self._leaves:
                self._succeeds(self._leave)
        finally:
            self._statements.close()

    def _take_due_steps(self, times: StepTimes) -> None:
        steps = {
            KeeperStep.RENEWAL: self._renew,
            KeeperStep.HEARTBEAT: self._write_heartbeat,
            KeeperStep.FIGURES: self._write_figures,
        }
        for step, function in steps.items():
            if not times.is_due(step, monotonic()):
                continue
            if not self._succeeds(function):
                times.failed(step, monotonic(), commits_hang=self.commits_hang)
                return  # start over with a renewal
            times.succeeded(step, monotonic())
        times.all_succeeded()

    def _succeeds(self, step: Callable[[], object]) -> bool:
        """Run `step`; return whether it succeeded. Its error is kept for `report()`."""
        self.steps += 1
        try:
            step()
        except Exception as error:
            if not isinstance(error, (LockNotAvailable, HeartbeatLocked)):
                self._statements.close()
            if isinstance(error, ConnectionStalled):
                self.commits_hang = True
            elif step == self._write_heartbeat and not isinstance(error, LOST):
                self.commits_hang = False
            self._record_error(error)
            return False
        if self._renewal.refusal is None and not self.commits_hang:
            self._last_error = None
        return True

    def _record_error(self, error: Exception) -> None:
        """Keep an error for `report()`, unless another was kept a moment ago."""
        if monotonic() - self._error_recorded_at >= REPORT_EVERY:
            self._error_recorded_at, self._last_error = monotonic(), error

    def _renew(self) -> None:
        self._renewal.renew()
        if self._renewal.refusal is not None:
            self._record_error(self._renewal.refusal)
        for queue, claimer in self._probes():
            with self._impatient() as cursor:
                queue_backoff.renew_probe(
                    cursor, queue=queue, claimer=claimer, lease=self._lease_of(queue)
                )

    def _write_heartbeat(self) -> None:
        columns = self._heartbeat()
        counted = worker_totals.totals_of(self._worker)
        timings = counted.snapshot() if counted else {}
        with self._impatient() as cursor:
            asked_at = lease_clock()
            self._beat_at = monotonic()
            if self._unconfirmed:
                leases.reopen_commands(cursor, worker=self._worker, received=self._received)
            self._unconfirmed = True
            reply = leases.record_heartbeat(
                cursor,
                worker=self._worker,
                **columns,
                unrenewed=self._renewal.unrenewed,
                timings=timings,
            )
        self._unconfirmed = False
        self._received += [each.id for each in reply.commands]
        if counted:
            counted.minutes.set_clock(reply.now, asked_at)
        if reply.commands:
            self._on_commands(reply.commands)
        self._on_heartbeat(reply.since_chores)
        if reply.stored:
            self.beats += 1
            self.commits_hang = False
        elif self.commits_hang:
            raise HeartbeatLocked(
                "the heartbeat's row is locked: the COMMIT of an earlier heartbeat still waits,"
                " perhaps for a synchronous standby"
            )

    def _write_figures(self) -> None:
        """Store the counts by minute; counts that cannot be stored now are stored later."""
        worker = self._worker
        if (counted := worker_totals.totals_of(worker)) is None:
            return
        rows, arrived = counted.minutes.take_unwritten()
        try:
            if rows or arrived:
                with self._impatient() as cursor:
                    figures.write(cursor, worker=worker, rows=rows)
                    figures.write_arrived(cursor, worker=worker, rows=arrived)
        except Exception:
            counted.minutes.not_written()
            raise
        counted.minutes.written()

    def _leave(self) -> None:
        with self._impatient() as cursor:
            leases.leave(cursor, worker=self._worker)

    @contextmanager
    def _impatient(self) -> Iterator[Cursor]:
        """Yield a cursor in a transaction that waits up to HEARTBEAT_LOCK_SECONDS for each lock."""
        cursor = self._statements.cursor()
        with self._statements.transaction(lock=HEARTBEAT_LOCK_SECONDS):
            yield cursor
