"""Settle the messages of a dead sibling, on a thread and a connection that last only as long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import psycopg

from django_mq.conf.error_logs import log_failure
from django_mq.executor import reports, settle_effects
from django_mq.executor.ended import Ended, failed_row, failure_end
from django_mq.executor.outage import Outage
from django_mq.executor.statements import Statements, skip_refused_rows
from django_mq.executor.watchdog import STALL_MARGIN, Link
from django_mq.messages import ClaimedRow, Delivery, Fence
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.outcomes import AttemptEnded, WorkerLost, cut_short
from django_mq.policy.stack import Frame
from django_mq.policy.time_limits import TimeLimit
from django_mq.store import leases, notify, ordered_queues, queue_backoff, recover, settle
from django_mq.store.limits import STATEMENT_SECONDS, Limits
from django_mq.store.server_errors import LOST
from django_mq.worker.releasing import release_skipping_refused

#: Seconds between two attempts: the backends of a dead process hold its locks for a moment.
RETRY_PAUSE = 0.25
#: Seconds after the death in which a claim of the dead process mostly commits.
LATE_CLAIM = 1.0
#: Seconds in which it may still commit: a busy disk, a replica or a trigger may hold it up.
LATEST_CLAIM = STATEMENT_SECONDS + STALL_MARGIN
#: Seconds between two looks for such a claim.
LOOK_INTERVAL = 1.0
#: Seconds after which leases have lapsed, and other workers take over what is left.
GIVE_UP_SECONDS = 300.0
#: The limits of its statements: one that waits longer for a lock is left to the next attempt.
LIMITS = Limits(lock=1.0)


@dataclass(slots=True)
class DeadWorker:
    """A worker process that died, and the messages that lose an attempt by its death.

    `timed_out` messages ran past their timeout; `lost` messages were running when the process died,
    at `died_at` of the system-wide monotonic clock; this process learned of it at `received_at`.
    Three dicts are by message id: `stopped` has the operator who stopped the message, `ran` the
    seconds that it ran, `stacks` the frames of its handler's stack. With `planned`, no message is
    the cause of the death, so none becomes a suspect: the drain of the process ran out of time, or
    it was ended for a message that an operator stopped.
    """

    worker: str
    reason: str
    planned: bool = False
    timed_out: list[Fence] = field(default_factory=list)
    lost: list[Fence] = field(default_factory=list)
    stopped: dict[int, str] = field(default_factory=dict)
    ran: dict[int, float] = field(default_factory=dict)
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    died_at: float = field(default_factory=monotonic)
    received_at: float = field(default_factory=monotonic)

    @property
    def charged(self) -> list[Fence]:
        """The messages that lose an attempt."""
        return [*self.timed_out, *self.lost]


class Recovery:
    """Settles what dead siblings held.

    Calls `on_freed` when a message may be claimed again. Calls `on_charged` when failures were
    counted: if processes die one after another, this one may soon die, too, and its counts with it.
    """

    def __init__(
        self,
        alias: str,
        *,
        outage: Outage,
        policy_of: Callable[[ClaimedRow], RetryPolicy],
        limit_of: Callable[[ClaimedRow], TimeLimit | None],
        on_freed: Callable[[], None],
        on_charged: Callable[[], None],
        link: Link,
    ) -> None:
        self._statements = Statements(alias, limits=LIMITS, link=link)
        self._outage = outage
        self._policy_of = policy_of
        self._limit_of = limit_of
        self._on_freed = on_freed
        self._on_charged = on_charged
        self._changed = threading.Condition()
        self._dead: list[tuple[DeadWorker, Callable[[], None]]] = []
        self._untried: set[str] = set()
        self._settled: list[DeadWorker] = []
        self._runs = self._finishing = False
        # Messages that the database refuses to charge: their leases lapse.
        self._refused: set[Fence] = set()

    def recover(self, dead: DeadWorker, done: Callable[[], None]) -> None:
        """Begin to settle what `dead` held; `done` is called at the end. From any thread."""
        with self._changed:
            self._dead.append((dead, done))
            self._untried.add(dead.worker)
            self._changed.notify_all()
            if not self._runs:
                # Starting a thread may fail: then the next call starts it. It waits for this lock.
                threading.Thread(target=self._run, name="mq-recovery", daemon=True).start()
                self._runs = True

    def wait_for_first_try(self, seconds: float) -> None:
        """Wait, for at most `seconds`, until it has tried once to settle everything it knows of."""
        with self._changed:
            self._changed.wait_for(lambda: not self._untried, seconds)

    def recovering(self) -> bool:
        """Return whether a message of a dead process is not settled yet."""
        return bool(self._dead)

    def finish(self, seconds: float) -> None:
        """Wait, for at most `seconds`, until everything is settled and the connection is closed."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._runs, seconds)

    def _run(self) -> None:
        while True:
            for each, done in list(self._dead):
                settled = self._is_settled(each)
                with self._changed:
                    self._untried.discard(each.worker)
                    self._changed.notify_all()
                if settled:
                    with contextlib.suppress(OSError):  # the supervisor may be gone
                        done()
                    with self._changed:
                        self._dead.remove((each, done))
                        self._settled.append(each)
            self._release_late_claims()
            stopped = self._outage.stopped()
            with self._changed:
                if stopped or not self._has_work():
                    self._statements.close()
                    self._runs = False
                    self._changed.notify_all()
                    return
                if not self._untried:  # another may have been added meanwhile
                    self._changed.wait(RETRY_PAUSE if self._dead else LOOK_INTERVAL)

    def _has_work(self) -> bool:
        return bool(self._dead or (self._settled and not self._finishing))

    def _release_late_claims(self) -> None:
        """Release the messages of claims that committed after their process was settled."""
        since = monotonic() - LATEST_CLAIM
        self._settled = [dead for dead in self._settled if dead.received_at > since]
        try:
            for dead in self._settled:
                cursor = self._statements.cursor()
                charged = [fence.id for fence in dead.charged]
                if release_skipping_refused(cursor, worker=dead.worker, kept=charged):
                    self._on_freed()
                    notify.ring_if_room(cursor)
        except Exception:  # the next look tries again
            self._statements.close()

    def _is_settled(self, dead: DeadWorker) -> bool:
        """Call `settle()`; return whether nothing is left to try."""
        try:
            settled = self.settle(dead)
        except psycopg.errors.LockNotAvailable:
            return False
        except LOST as error:
            self._statements.close()
            self._outage.wait(error)
            return False
        except Exception as error:
            text = "could not settle what worker %s held: it runs again when its leases lapse"
            log_failure("recovery_failed", error, text, dead.worker, worker=dead.worker)
            self._statements.close()
            return True
        self._outage.record_answer()
        return settled

    def settle(self, dead: DeadWorker) -> bool:
        """Settle the messages of `dead` that can be settled now; return whether none is left."""
        cursor = self._statements.cursor()
        freed = release_skipping_refused(
            cursor, worker=dead.worker, kept=[fence.id for fence in dead.charged]
        )
        ended = self._charge(dead, dead.timed_out, self._timed_out)
        ended += self._charge(dead, dead.lost, _lost)
        reports.all_ended(ended)
        if ended:
            self._on_charged()
        probed = queue_backoff.drop_probes_of(cursor, worker=dead.worker)
        ordered_queues.disown(cursor, worker=dead.worker)
        if freed or ended or probed:
            self._on_freed()
            notify.ring_if_room(cursor)  # this process may be full; others may not
        left = recover.anything_left(cursor, worker=dead.worker)
        if left and monotonic() - dead.received_at < GIVE_UP_SECONDS:
            return False
        # Since the death, not since this process was told: if processes die one after another, none
        # lives for so long, and the dead ones that each of them has to look at would add up.
        if monotonic() - dead.died_at < LATE_CLAIM:
            return False
        leases.leave(cursor, worker=dead.worker)
        return True

    def _charge(
        self,
        dead: DeadWorker,
        fences: list[Fence],
        error_of: Callable[[DeadWorker, ClaimedRow], AttemptEnded],
    ) -> list[Ended]:
        """Charge the messages of `fences`; one that the database refuses stops no other."""

        def refused(fence: Fence, error: Exception) -> None:
            self._refused.add(fence)
            text = "could not charge message %s of worker %s: it runs again when its lease lapses"
            id, worker = fence.id, dead.worker
            log_failure("recovery_failed", error, text, id, worker, worker=worker, message_id=id)

        together = partial(self._charge_together, dead, error_of)
        left = [fence for fence in fences if fence not in self._refused]
        return skip_refused_rows(together, left, refused)

    def _charge_together(
        self,
        dead: DeadWorker,
        error_of: Callable[[DeadWorker, ClaimedRow], AttemptEnded],
        fences: Sequence[Fence],
    ) -> list[Ended]:
        if not fences:
            return []
        ended: list[Ended] = []
        cursor = self._statements.cursor()
        with self._statements.transaction():
            for row in recover.lock_running(cursor, fences):
                delivery = Delivery(row)
                error, seconds = error_of(dead, row), dead.ran.get(delivery.id, 0.0)
                each = failure_end(delivery, self._policy_of(row), error, seconds=seconds)
                suspect = isinstance(error, WorkerLost) and not dead.planned
                failed = failed_row(each, suspect=suspect)
                settle.fail(cursor, [failed] if failed else [])
                ended.append(each)
            fences = [each.delivery.fence for each in ended]
            recover.backdate(cursor, fences, seconds=monotonic() - dead.died_at)
            settle_effects.write_skipping_refused(cursor, ended)
        return ended

    def _timed_out(self, dead: DeadWorker, row: ClaimedRow) -> AttemptEnded:
        ran = dead.ran.get(row.id, 0.0)
        error = cut_short(dead.stopped.get(row.id), ran, self._limit_of(row))
        error.stack = dead.stacks.get(row.id, ())
        return error


def _lost(dead: DeadWorker, row: ClaimedRow) -> AttemptEnded:
    return WorkerLost(dead.reason)
