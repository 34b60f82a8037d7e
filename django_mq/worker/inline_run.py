"""Run all due messages now, in the caller's thread and on its connection: for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psycopg

from django_mq.conf import get_settings
from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor import reports
from django_mq.executor.connections import statement_cursor
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.leased_call import leased_call
from django_mq.executor.nonatomic import run_call
from django_mq.executor.other_threads import as_function
from django_mq.executor.outage import Outage
from django_mq.executor.retry_policies import policies
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard import Scoreboard
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.settle_rows import settle_all
from django_mq.executor.settlement import Settlement
from django_mq.executor.slice_state import SettleIncomplete, SliceAborted
from django_mq.executor.slices import SliceRunner
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.executor.tasks import Task
from django_mq.messages import ClaimedRow, Delivery
from django_mq.operations.steps import carry_out_all
from django_mq.policy.line_marks import FRONT, LineMarks
from django_mq.policy.missing_right import is_missing_right
from django_mq.signals import is_observed, message_started
from django_mq.store import adopt, leases, ordered_queues, poll
from django_mq.store.claim import Lane
from django_mq.worker.borrowed_connection import TransactionGuard
from django_mq.worker.claims import ClaimRouter
from django_mq.worker.inline_failures import InlineFailure, failure_of
from django_mq.worker.ordered_queues import ADOPT_WINDOW
from django_mq.worker.queue_backoff import BackoffLevels
from django_mq.worker.queue_options import ClaimOptionsCache
from django_mq.worker.resolver import Resolver, settle_held

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


#: After this many deliveries a run gives up, since handlers may broadcast to each other for ever.
MAX_DELIVERIES = 100_000
#: The name of the worker that claims the messages.
NAME = "drain"


class InlineRun:
    """Runs one message at a time, each in a savepoint instead of the transaction of its slice.

    `failed` are the failed attempts, in order.
    """

    def __init__(self, connection: BaseDatabaseWrapper, *, queue: str | None) -> None:
        self.failed: list[InlineFailure] = []
        self._connection = connection
        self._queue = queue
        self._settings = get_settings()
        self._options = ClaimOptionsCache(self._settings, batch_size=1)
        self._resolver = Resolver(self._settings, batch_size_of=self._options.batch_size_of)
        self._context = RunContext(
            alias=connection.alias,
            outage=_RightsRequired(threading.Event()),
            # A test does not wait: with a floor, one run would not reach the last attempt.
            policy_of=policies(self._settings, floor=0.0),
            lease_of=self._options.lease_of,
            shortest_lease=0.0,
            on_settled=self._record,
        )
        # One message runs at a time, so none is in hand when a queue stops.
        self._backoffs = BackoffLevels(self._settings, stop_queue=lambda queue, before: None)
        self._owned: dict[str, LineMarks] = {}
        self._claims = ClaimRouter(
            worker=NAME,
            owned=self._owned,
            probing=self._backoffs.probe_started,
            stopped_queues=StoppedQueues(),
        )

    def run(self) -> int:
        """Run until nothing is due; return the number of deliveries.

        Raises KeyboardInterrupt, and the error of a handler that ended the test's transaction.
        """
        delivered = 0
        for row in self._due():
            task = self._resolver.resolve(self._cursor(), Delivery(row))
            if not isinstance(task, Task):
                if task is not None:
                    settle_held(self._cursor(), [task])
                self._backoffs.cancel_probes(self._cursor(), [row.claimed_by])
                continue
            delivered += 1
            if delivered > MAX_DELIVERIES:
                raise RuntimeError(
                    f"more than {MAX_DELIVERIES:,} deliveries: do handlers broadcast to each"
                    " other without end?"
                )
            if task.handler.atomic:
                self._run_slices(task)
            else:
                self._run_unbound(task)
            self._backoffs.write(self._cursor())
            if self.failed and isinstance(self.failed[-1].error, KeyboardInterrupt):
                raise self.failed[-1].error
        return delivered

    def _due(self) -> Iterator[ClaimedRow]:
        """Claim and yield messages until none is due, also those that operations make due."""
        carry_out_all(self._connection.alias)
        while True:
            while rows := self._claim():
                yield from rows
            if not carry_out_all(self._connection.alias):
                return

    def _run_slices(self, task: Task) -> None:
        session = Session(self._connection, borrowed=True)
        slices = SliceRunner(
            session,
            self._context,
            entries=ExecutorEntries(Scoreboard(1), 0, 1),
            settlement=Settlement(session, self._context),
            slice_seconds=self._settings.slice_seconds,
            stopped_queues=StoppedQueues(),
        )
        # The connection is watched for one message alone: a handler that is not atomic may make a
        # request, whose handler runs in an inline run within this one.
        try:
            again = [task]
            while again:
                try:
                    again = slices.run(again).to_rerun
                except SettleIncomplete:
                    reports.lease_lost(task.delivery)
                    self._record([Ended(task.delivery, Settled.LOST)])
                    return
                except SliceAborted as aborted:
                    broke = aborted
                    break
            else:
                return
        finally:
            session.unwatch()
        # Raised outside `except`, so that the handler's error keeps its own cause and context.
        raise next(
            (each.error for each in self.failed if each.delivery is task.delivery),
            HandlerBrokeTransaction(f"the handler ended its transaction: {broke.__cause__}"),
        )

    def _record(self, ended: Sequence[Ended]) -> None:
        self._backoffs.record(ended)
        self.failed += filter(None, map(failure_of, ended))

    def _claim(self) -> list[ClaimedRow]:
        cursor = self._cursor()
        self._claims.begin_round()
        seen = poll.poll(cursor)
        self._claims.facts.update(seen)
        for each in seen:
            if each.due and self._queue in (None, each.queue):
                options = self._options.of(each.queue)
                if options.ordered:
                    self._own(each.queue)
                lane = Lane(each.queue, each.number)
                claim = self._claims.claim(cursor, [lane], options, limit=1).claim
                while claim.unfinished and not claim.rows:
                    claim = self._claims.claim(cursor, [lane], options, limit=1).claim
                if claim.rows:
                    return claim.rows
        return []

    def _own(self, queue: str) -> None:
        """Become the owner of an ordered queue, and move messages outside its line into it."""
        self._owned[queue] = FRONT
        ordered_queues.own(self._cursor(), queue=queue, worker=NAME, lease=self._settings.lease)
        take = partial(adopt.adopt, self._cursor(), queue=queue, limit=ADOPT_WINDOW)
        after = take().resume
        while after is not None:
            after = take(after=after).resume

    def _run_unbound(self, task: Task) -> None:
        lease = self._context.lease_of(task.delivery.queue)
        started = leases.start(self._cursor(), [task.delivery.fence], lease=lease)
        if started.get(task.delivery.id):
            self._settle(Ended(task.delivery, Settled.DEAD_UNSTARTED, reason="expired"))
            return
        leased = leased_call([task], alias=self._connection.alias, lease=lease, timeout=NoTimeout())
        [delivery] = leased.deliveries
        if is_observed(message_started):
            reports.started(delivery)
        function: Any = task.handler.call
        if task.handler.is_async:
            function = as_function(function)
        guard = TransactionGuard(self._connection)
        began = perf_counter()
        result, error = run_call(function, leased, alias=self._connection.alias, in_test=True)
        seconds = perf_counter() - began
        try:
            kept = guard.end(error)
        except HandlerBrokeTransaction as broke:
            self._record([self._context.failure_end(delivery, broke, seconds)])
            raise
        if guard.undone:
            delivery.finished = False
        [ended] = leased.end(self._context.failure_end, result, kept, seconds)
        self._settle(ended)

    def _settle(self, ended: Ended) -> None:
        if settle_all(self._cursor(), [ended]):
            reports.lease_lost(ended.delivery)
            ended = ended._replace(settled=Settled.LOST)
        reports.settled([ended], self._context)

    def _cursor(self) -> psycopg.Cursor[Any]:
        self._connection.ensure_connection()
        return statement_cursor(self._connection.connection)


class _RightsRequired(Outage):
    """Raises the error of a missing right: while a test waits, nobody grants it."""

    def wait(self, error: BaseException, *, logged: bool = False) -> None:
        if is_missing_right(error):
            raise error
        super().wait(error, logged=logged)


class NoTimeout:
    """The timeout of a handler that has none."""

    def extend(self, seconds: float) -> None:
        """Do nothing: an inline run has no timeouts."""

    def judged(self, id: int) -> None:
        """Do nothing: no supervisor watches an inline run."""
