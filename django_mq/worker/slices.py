"""A slice: several deliveries in one transaction, settled with what their handlers wrote.

lock -> run each handler behind its lazy savepoint -> settle -> commit. Whatever goes wrong with
the transaction as a whole, nothing is charged twice and nothing is lost: what had run runs again
alone, or is settled by its fence if it turns out to be committed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import transaction
from django.db.utils import Error as DjangoDatabaseError

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.signals import message_started, wanted
from django_mq.store import settle
from django_mq.worker import reporting
from django_mq.worker.calling import argument_of, call, is_conflict, tidy_up
from django_mq.worker.database import LOST, Outage, prepare_statements
from django_mq.worker.ending import Ended, Settled, any_back, end, settle_all
from django_mq.worker.savepoint import LazySavepoint, TransactionGone

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.backoff import RetryPolicy
    from django_mq.messages import ClaimedRow
    from django_mq.worker.board import Places
    from django_mq.worker.hand import Task

logger = logging.getLogger("django_mq")

#: More open subtransactions than these spill over in every other backend's snapshot (PostgreSQL
#: keeps 64 in shared memory).
MOST_SAVEPOINTS = 50
#: The server ends a transaction that is idle for the handler's timeout and this, in seconds.
IDLE_MARGIN = 30.0
#: Seconds between two looks of the server at whether we are still there.
CHECK_INTERVAL = 0.5
#: So often a delivery may fall victim to others before it counts as a failed attempt.
MOST_CONFLICTS = 20

_DATABASE_ERRORS = (psycopg.Error, DjangoDatabaseError)


class _Gone(Exception):
    """The transaction ended under a handler: the last of `ran` did it."""


class _Lost(Exception):
    """Settling changed fewer rows than it should: some are no longer ours."""


@dataclass(slots=True)
class _Progress:
    """How far one slice came."""

    started: float
    ended: list[Ended] = field(default_factory=list)
    ran: list[Task] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)
    again: list[Task] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    xid: str | None = None
    driver: Any = None
    gone: bool = False
    culprit: Ended | None = None
    savepoints: int = 0
    committing: bool = False
    stopped: bool = False


@dataclass(slots=True)
class Remainder:
    """What a slice did not settle: `left` did not start, `again` runs again, each alone."""

    left: list[Task] = field(default_factory=list)
    again: list[Task] = field(default_factory=list)


class Slices:
    """Runs slices on one connection, in the thread that owns it.

    `policy` gives the retry policy of a row, `settled` is told which ids are no
    longer in hand, and whether some of them are back in their queue.
    """

    def __init__(
        self,
        wrapper: BaseDatabaseWrapper,
        *,
        places: Places,
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settled: Callable[[list[int], bool], None],
        slice_seconds: float,
    ) -> None:
        self._wrapper = wrapper
        self._savepoint = LazySavepoint(wrapper)
        self._places = places
        self._outage = outage
        self._policy = policy
        self._settled = settled
        self._slice_seconds = slice_seconds
        self._conflicts: Counter[int] = Counter()
        self._nested = False

    def close(self) -> None:
        """Give the connection back as it was."""
        self._savepoint.unwatch()

    def run(self, tasks: Sequence[Task]) -> Remainder:
        """Run `tasks` in one transaction, as many as there is time for."""
        progress = _Progress(started=monotonic())
        self._nested = self._wrapper.in_atomic_block
        try:
            self._wrapper.ensure_connection()
            progress.driver = self._wrapper.__dict__["connection"]
            with transaction.atomic(using=self._wrapper.alias, durable=True):
                self._run_locked(tasks, progress)
                self._settle(progress.ended)
                progress.hooks = self._take_hooks()
                progress.committing = True
        except (_Gone, _Lost, *_DATABASE_ERRORS) as error:
            if self._nested:
                raise  # a test's transaction cannot be mended
            if progress.gone:
                self._mend_gone(tasks, progress)
            elif isinstance(error, _Lost):
                self._run_again(tasks, progress)
            else:
                self._mend(tasks, progress, error)
        else:
            self._outage.over()
            self._finish(progress)
        return Remainder(progress.left, progress.again)

    # ---- inside the transaction

    def _run_locked(self, tasks: Sequence[Task], progress: _Progress) -> None:
        idle_limit = max(task.timeout for task in tasks) + IDLE_MARGIN
        cursor = self._cursor()
        locked = settle.lock(
            cursor,
            [task.delivery.fence for task in tasks],
            idle_limit=idle_limit,
            check_interval=CHECK_INTERVAL,
        )
        mine: list[Task] = []
        skipped: list[Task] = []
        for task in tasks:
            row = locked.get(task.delivery.id)
            if row is None:
                skipped.append(task)
                continue
            progress.xid = row.xid
            if row.expired:
                progress.ran.append(task)
                progress.ended.append(Ended(task.delivery, Settled.BURIED, reason="expired"))
            else:
                mine.append(task)
        if skipped:
            self._sort_skipped(cursor, skipped, progress)
        if mine:
            self._savepoint.begin(
                {
                    "idle_in_transaction_session_timeout": str(round(idle_limit * 1000)),
                    "client_connection_check_interval": str(round(CHECK_INTERVAL * 1000)),
                },
                own_session=not self._nested,
            )
            self._run_all(mine, progress)

    def _sort_skipped(
        self, cursor: psycopg.Cursor[Any], skipped: list[Task], progress: _Progress
    ) -> None:
        ours = settle.still_ours(cursor, [task.delivery.fence for task in skipped])
        for task in skipped:
            if task.delivery.id in ours:
                progress.left.append(task)  # a renewal has it for a moment: the next slice
            else:
                reporting.lease_lost(task.delivery)
                self._settled([task.delivery.id], False)

    def _run_all(self, tasks: list[Task], progress: _Progress) -> None:
        if tasks[0].handler.batch:
            self._attempt(tasks, progress)
            return
        until = progress.started + self._slice_seconds
        for place, task in enumerate(tasks):
            if place and (
                progress.stopped or progress.savepoints >= MOST_SAVEPOINTS or monotonic() >= until
            ):
                progress.left[:0] = tasks[place:]
                return
            self._attempt([task], progress)

    def _attempt(self, tasks: list[Task], progress: _Progress) -> None:
        first, savepoint, hooks = tasks[0], self._savepoint, len(self._wrapper.run_on_commit)
        if wanted(message_started):
            for task in tasks:
                reporting.started(task.delivery)
        began = perf_counter()
        self._places.start(
            [task.delivery.fence for task in tasks], monotonic() + first.timeout, True
        )
        savepoint.arm()
        result, error = call(first.handler.function, argument_of(tasks), first.delivery)
        seconds = perf_counter() - began
        try:
            if error is None:
                error = self._keep()
            if savepoint.opened:
                progress.savepoints += 1
            if error is not None:
                savepoint.undo()
                del self._wrapper.run_on_commit[hooks:]
        except TransactionGone as gone:
            broke = error or HandlerBrokeTransaction(f"the handler ended its transaction: {gone}")
            self._blame(tasks, broke, seconds, hooks, progress)
            raise _Gone from gone
        except _DATABASE_ERRORS as lost:
            self._blame(tasks, error or lost, seconds, hooks, progress)
            raise _Gone from lost
        finally:
            self._places.end(len(tasks))
        if error is None:
            progress.ran.extend(tasks)
            progress.ended.extend(
                Ended(task.delivery, Settled.ACKED, result, seconds) for task in tasks
            )
        else:
            self._failed(tasks, error, seconds, progress)

    def _keep(self) -> BaseException | None:
        try:
            self._savepoint.keep()
        except TransactionGone:
            raise
        except Exception as error:
            return error
        return None

    def _failed(
        self, tasks: list[Task], error: BaseException, seconds: float, progress: _Progress
    ) -> None:
        if self._may_repeat(tasks, error):
            progress.again.extend(tasks)
            progress.stopped = True
        elif len(tasks) > 1:
            progress.again.extend(tasks)  # a batch that failed: its messages run one by one
        else:
            progress.ran.append(tasks[0])
            progress.ended.append(self._end(tasks[0], error, seconds))

    def _may_repeat(self, tasks: list[Task], error: BaseException) -> bool:
        if not is_conflict(error):
            return False
        for task in tasks:
            self._conflicts[task.delivery.id] += 1
        return all(self._conflicts[task.delivery.id] <= MOST_CONFLICTS for task in tasks)

    def _blame(
        self,
        tasks: list[Task],
        error: BaseException,
        seconds: float,
        hooks: int,
        progress: _Progress,
    ) -> None:
        progress.gone = True
        progress.hooks = self._wrapper.run_on_commit[:hooks]
        if len(tasks) > 1:
            progress.again.extend(tasks)
        else:
            progress.culprit = self._end(tasks[0], error, seconds)

    def _end(self, task: Task, error: BaseException, seconds: float) -> Ended:
        return end(task.delivery, self._policy(task.delivery._row), error, seconds=seconds)

    def _settle(self, ended: Sequence[Ended]) -> None:
        if lost := settle_all(self._cursor(), ended):
            raise _Lost(lost)

    def _take_hooks(self) -> list[Any]:
        if self._nested:
            return []  # within somebody's transaction: a test's
        hooks, self._wrapper.run_on_commit = self._wrapper.run_on_commit, []
        return hooks

    # ---- after it

    def _finish(self, progress: _Progress) -> None:
        self._run_hooks(progress)
        self._settled([ended.delivery.id for ended in progress.ended], any_back(progress.ended))
        for ended in progress.ended:
            reporting.ended(ended)
        if self._conflicts:
            for task in progress.ran:
                self._conflicts.pop(task.delivery.id, None)
        tidy_up()

    def _run_hooks(self, progress: _Progress) -> None:
        for _, hook, _ in progress.hooks:
            try:
                hook()
            except Exception:
                logger.exception(
                    "an on_commit hook failed; its message is acked", extra={"event": "hook_failed"}
                )

    def _run_again(self, tasks: Sequence[Task], progress: _Progress) -> None:
        """Nothing of the slice holds: each message that ran runs again alone."""
        ran = progress.ran
        if len(tasks) == 1 and ran:
            reporting.lease_lost(ran[0].delivery)
            self._settled([ran[0].delivery.id], False)
        else:
            progress.again.extend(ran)
        progress.ended, progress.ran = [], []

    def _mend_gone(self, tasks: Sequence[Task], progress: _Progress) -> None:
        """A handler ended the transaction, or the connection went away under it."""
        self._reset()
        culprit = progress.culprit
        begun = {task.delivery.id for task in (*progress.ran, *progress.again)}
        if culprit is not None:
            begun.add(culprit.delivery.id)
        progress.left = [task for task in tasks if task.delivery.id not in begun]
        if progress.ended and self._was_committed(progress.xid):
            self._run_hooks(progress)
        else:
            progress.left[:0] = progress.ran
            progress.ended = []
        if culprit is not None:
            progress.ended.append(culprit)
        self._settle_afterwards(progress)

    def _mend(self, tasks: Sequence[Task], progress: _Progress, error: Exception) -> None:
        """The server refused one of our own statements or the COMMIT, or did not answer."""
        answered = progress.driver is not None and not progress.driver.closed
        if progress.committing and not answered:
            self._reset()
            if self._was_committed(progress.xid):
                self._finish(progress)
            else:
                self._run_again_or_fail(progress, None)
            return
        if not answered or (isinstance(error, LOST) and not is_conflict(error)):
            self._reset()
            self._outage.wait(error)
            again = {task.delivery.id for task in progress.again}
            progress.left = [task for task in tasks if task.delivery.id not in again]
        elif progress.ended or progress.again:
            self._run_again_or_fail(progress, error)
        else:
            self._reset()
            self._outage.wait(error)
            progress.left = list(tasks)

    def _run_again_or_fail(self, progress: _Progress, error: Exception | None) -> None:
        ran, ended = progress.ran, progress.ended
        progress.ran, progress.ended = [], []
        alone = len(ran) == 1 and not progress.again
        if error is not None and alone and not self._may_repeat(ran, error):
            progress.ended = [self._end(ran[0], error, ended[0].seconds)]
            self._settle_afterwards(progress)
        else:
            progress.again.extend(ran)

    def _settle_afterwards(self, progress: _Progress) -> None:
        """Settle by fence, in a transaction of its own, what ended in one that is no more."""
        if not progress.ended:
            return
        while True:
            try:
                with transaction.atomic(using=self._wrapper.alias, durable=True):
                    lost = settle_all(self._cursor(), progress.ended)
                break
            except _DATABASE_ERRORS as error:
                self._reset()
                self._outage.wait(error)
                if self._outage.stopped():
                    return  # the lease lapses, and the attempt counts
        self._outage.over()
        for ended in progress.ended:
            if ended.delivery.id in lost:
                reporting.lease_lost(ended.delivery)
            else:
                reporting.ended(ended)
        self._settled([ended.delivery.id for ended in progress.ended], any_back(progress.ended))

    def _was_committed(self, xid: str | None) -> bool:
        """Ask what became of transaction `xid`, for as long as the server cannot say."""
        while xid is not None and not self._outage.stopped():
            try:
                status = settle.transaction_status(self._cursor(), xid)
            except _DATABASE_ERRORS as error:
                self._reset()
                self._outage.wait(error)
                continue
            if status != "in progress":
                return status == "committed"
            self._outage.wait_quietly()
        return False

    def _reset(self) -> None:
        """Drop the connection, whatever state it is in; the next use makes a new one."""
        wrapper = self._wrapper
        self._savepoint.disarm()
        try:
            wrapper.close()
        except _DATABASE_ERRORS:
            pass
        wrapper.connection = None
        wrapper.in_atomic_block = False
        wrapper.closed_in_transaction = False
        wrapper.needs_rollback = False
        wrapper.savepoint_ids = []
        wrapper.atomic_blocks = []
        wrapper.run_on_commit = []

    def _cursor(self) -> psycopg.Cursor[Any]:
        wrapper = self._wrapper
        if wrapper.connection is None:
            wrapper.ensure_connection()
        driver = wrapper.connection
        if driver.prepare_threshold is None:
            prepare_statements(wrapper)
        return psycopg.Cursor(driver)
