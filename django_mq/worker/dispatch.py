"""Turn claimed rows into tasks; release unstarted tasks, and rows behind one that cannot run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from django_mq.conf.error_logs import log_failure
from django_mq.executor.async_runner import AsyncRunner
from django_mq.executor.ended import Ended
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.outage import RECONNECT_WAIT, Outage
from django_mq.executor.statements import Statements, skip_refused_rows
from django_mq.executor.tasks import Line, Task
from django_mq.messages import LONG_AGO, ClaimedRow, Delivery, Fence
from django_mq.store import Cursor, settle
from django_mq.store.claim_lapsed import forget_lapse
from django_mq.store.server_errors import LOST
from django_mq.worker.queue_backoff import BackoffLevels
from django_mq.worker.quota import Quota
from django_mq.worker.resolver import Resolver, line_of, settle_held

logger = logging.getLogger("django_mq")

#: How often to try at once to release a row that another session has locked. Later, rounds of the
#: loop try again, at most once per RECONNECT_WAIT.
RELEASE_TRIES = 4


@dataclass(slots=True)
class _SortedRows:
    """Rows by their outcome: tasks, settled rows, and rows to release.

    Rows to release are behind one that cannot run here, or the database did not answer for them.
    """

    tasks: list[Task] = field(default_factory=list)
    settled: list[Fence] = field(default_factory=list)
    to_release: list[Delivery] = field(default_factory=list)


class Dispatch:
    """Turns claimed rows into tasks for the local queue, and coroutines for the runner.

    Used by the thread that claims. `on_freed` is called when rows have gone back to their queues.
    """

    def __init__(
        self,
        *,
        resolver: Resolver,
        local_queue: LocalQueue,
        runner: AsyncRunner,
        backoffs: BackoffLevels,
        quota: Quota,
        statements: Statements,
        outage: Outage,
        on_freed: Callable[[], None],
    ) -> None:
        self._resolver = resolver
        self._local_queue = local_queue
        self._runner = runner
        self._backoffs = backoffs
        self._quota = quota
        self._statements = statements
        self._outage = outage
        self._on_freed = on_freed
        self._pending: deque[Delivery] = deque()
        # Lines with a message that cannot run here: messages claimed behind it are released.
        self._halted_lines: set[Line] = set()
        #: Messages to release once the database is back.
        self.unreleased: list[Fence] = []
        # Those of them that were taken over but never started, and lapsed only once.
        self._lapsed_once: list[Fence] = []
        self._rests_until = float("-inf")

    def take(
        self, cursor: Cursor, rows: list[ClaimedRow], *, taken_over: bool, asked_at: float
    ) -> None:
        """Take newly claimed rows; those `taken_over` go before the rows already here.

        `asked_at` is when the claim was sent, by `lease_clock()`.
        """
        if taken_over:  # the previous attempt may still run: lock the row before the start
            asked_at = LONG_AGO
        deliveries = [Delivery(row, asked_at) for row in rows]
        self._local_queue.unsettled.add(deliveries)
        self._pending.extend(deliveries)
        self.dispatch_pending(cursor, first=taken_over)

    def dispatch_pending(self, cursor: Cursor, *, first: bool = False) -> None:
        """Dispatch claimed rows; those that need a statement wait if the database is lost.

        With `first`, their tasks go before those already in the local queue.
        """
        sorted_rows = _SortedRows()
        try:
            self._resolve_all(cursor, sorted_rows)
        finally:
            if sorted_rows.settled:
                self._local_queue.unsettled.remove(sorted_rows.settled)
                self._on_freed()
            try:
                if sorted_rows.to_release:
                    self._release(sorted_rows.to_release)
                    self._on_freed()
            finally:
                if sorted_rows.tasks:  # an empty put would wake the executors
                    self._submit(sorted_rows.tasks, first)

    def _resolve_all(self, cursor: Cursor, sorted_rows: _SortedRows) -> None:
        check_limits = self._resolver.may_exceed(self._pending)
        held: list[Ended] = []
        try:
            while self._pending:
                if not self._halted_lines:
                    sorted_rows.tasks += self._take_ready(check_limits)
                    if not self._pending:
                        break
                delivery = self._pending.popleft()
                line = line_of(delivery._row)
                if line in self._halted_lines:
                    sorted_rows.to_release.append(delivery)
                    continue
                found = self._resolve_one(cursor, delivery, sorted_rows)
                if isinstance(found, Task):
                    sorted_rows.tasks.append(found)
                    continue
                if found is None:
                    sorted_rows.settled.append(delivery.fence)
                else:
                    held.append(found)
                self._backoffs.cancel_probes(cursor, [delivery._row.claimed_by])
                if line is not None:
                    self._halted_lines.add(line)
            if held:
                settle_held(cursor, held)
                self._quota.release(len(held))
        except LOST:  # some may be held by now: a second hold would take that for a lost lease
            sorted_rows.to_release += [each.delivery for each in held]
            raise
        sorted_rows.settled += [each.delivery.fence for each in held]
        self._halted_lines.clear()

    def _take_ready(self, check_limits: bool) -> list[Task]:
        try:
            return self._resolver.take_ready(self._pending, check_limits=check_limits)
        except Exception:  # nothing was taken: `_resolve_one()` finds the faulty row
            return []

    def _resolve_one(
        self, cursor: Cursor, delivery: Delivery, sorted_rows: _SortedRows
    ) -> Task | Ended | None:
        try:
            found = self._resolver.resolve(cursor, delivery)
            if found is None:  # it is not handled here, or it will be claimed again
                self._quota.release(1)
            return found
        except LOST:
            # Until these rows are dispatched, messages before them in their lines may run, and
            # fail.
            lines = (line_of(each._row) for each in self._pending)
            self._halted_lines.update(filter(None, lines))
            sorted_rows.to_release.append(delivery)  # it may be routed by now
            raise
        except Exception as error:  # the lease lapses, and the attempt counts
            log_failure(
                "dispatch_failed",
                error,
                "message %s cannot be dispatched",
                delivery.id,
                message_id=delivery.id,
                queue=delivery.queue,
            )
            return None

    def start_coroutines(self) -> None:
        """Start the coroutines that have slots, and whose turn in their lines has come."""
        if coroutines := self._local_queue.coroutines.take():
            self._start(coroutines)

    @property
    def resting(self) -> bool:
        """Whether rows to release were found locked a moment ago."""
        return monotonic() < self._rests_until

    def release(self, tasks: list[Task]) -> bool:
        """Release `tasks`, which did not start, and all rows not dispatched; attempts are refunded.

        Returns whether any was released. The next call tries those again that could not be released
        because the database was lost, or because another session has locked them.
        """
        deliveries = [*(task.delivery for task in tasks), *self._pending]
        self._pending.clear()
        return self._release(deliveries)

    def _release(self, deliveries: Sequence[Delivery]) -> bool:
        fences = [each.fence for each in deliveries]
        self._quota.release(len(fences))
        lapsed_once = self._lapsed_once + [
            each.fence for each in deliveries if each._is_taken_over and not each._row.suspect
        ]
        # First, so that no later renewal locks the rows; a renewal under way locks them for a
        # moment.
        self._local_queue.unsettled.remove(fences)
        new, tries = set(fences), RELEASE_TRIES
        fences = [*self.unreleased, *fences]
        refused: set[Fence] = set()
        any_released = False
        try:
            while fences:
                cursor = self._statements.cursor()
                self._backoffs.cancel_probes(cursor, {each.claimed_by for each in fences})
                if lapsed_once:
                    skip_refused_rows(partial(forget_lapse, cursor), lapsed_once)
                refused.clear()
                released = skip_refused_rows(
                    partial(settle.release, cursor), fences, lambda fence, _: refused.add(fence)
                )
                any_released |= bool(released)
                left = settle.still_ours(cursor, fences) if len(released) < len(fences) else ()
                fences = [fence for fence in fences if fence.id in left]
                tries -= 1
                if not (tries and new.intersection(fences)):
                    break
                self._outage.wait_quietly()
        except LOST:
            self.unreleased, self._lapsed_once = fences, lapsed_once
            raise
        if refused := refused.intersection(fences):
            log_unreleased(len(refused))
        self.unreleased = [fence for fence in fences if fence not in refused]
        self._lapsed_once = list(filter(set(self.unreleased).__contains__, lapsed_once))
        self._rests_until = monotonic() + RECONNECT_WAIT if self.unreleased else float("-inf")
        return any_released

    def _submit(self, tasks: list[Task], first: bool) -> None:
        put = self._local_queue.put_first if first else self._local_queue.put
        put(tasks)
        self.start_coroutines()

    def _start(self, coroutines: list[Task]) -> None:
        try:
            if not self._runner.is_alive():
                self._runner.start()
        except Exception:  # the system refuses a thread or a descriptor; perhaps not a sibling's
            self._local_queue.cancel_start(coroutines)
            with suppress(*LOST):
                self._release([task.delivery for task in coroutines])
            raise
        self._runner.submit(coroutines)


def log_unreleased(count: int) -> None:
    logger.warning(
        "could not release %s message(s): they run again when their leases lapse",
        count,
        extra={"event": "release_failed"},
    )
