"""Run a handler outside any transaction, in an executor's thread, under a renewed lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import psycopg
from asgiref.sync import async_to_sync
from psycopg.pq import TransactionStatus

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor import reports as reporting
from django_mq.executor.calls import call, tidy_up
from django_mq.executor.connections import LOST, Outage, simple_query, take_back
from django_mq.executor.ended import Ended, Settled, end
from django_mq.executor.leased_delivery import LeasedDelivery
from django_mq.messages import Fence
from django_mq.signals import message_started, wanted
from django_mq.store import leases

if TYPE_CHECKING:
    from django_mq.executor.scoreboard import ExecutorEntries
    from django_mq.executor.session import Session
    from django_mq.executor.settlement import Settlement
    from django_mq.executor.tasks import Task
    from django_mq.messages import ClaimedRow
    from django_mq.policy.backoff import RetryPolicy


class NonAtomic:
    """Runs one delivery at a time on the executor's connection."""

    def __init__(
        self,
        session: Session,
        *,
        entries: ExecutorEntries,
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settlement: Settlement,
        settled: Callable[[Sequence[Ended]], None],
        lease: Callable[[str], float],
    ) -> None:
        self._session = session
        self._wrapper = session.wrapper
        self._settlement = settlement
        self._entries = entries
        self._outage = outage
        self._policy = policy
        self._settled = settled
        self._lease = lease

    def run(self, task: Task) -> bool:
        """Run and settle `task`; return False if it could not start and is still held here."""
        try:
            lease = self._lease(task.delivery.queue)
            asked = leases.start_alone([task.delivery.fence], lease=lease)
            started = leases.started(simple_query(self._session.connect(), asked))
        except (psycopg.Error, *LOST) as error:
            self._session.close()
            self._outage.wait(error)
            return False
        self._outage.over()
        if not started:
            reporting.lease_lost(task.delivery)
            self._settled([Ended(task.delivery, Settled.LOST)])
        elif started[task.delivery.id]:
            self.settle(Ended(task.delivery, Settled.BURIED, reason="expired"))
        else:
            self._run_started(task)
        return True

    def _run_started(self, task: Task) -> None:
        clock = EntryClock(self._entries, task.delivery.fence)
        delivery = LeasedDelivery(
            task.delivery._row,
            alias=self._wrapper.alias,
            lease=self._lease(task.delivery.queue),
            clock=clock,
        )
        if wanted(message_started):
            reporting.started(delivery)
        clock.extend(task.timeout)
        began = perf_counter()
        self._session.link.lent = True
        try:
            function = task.handler.call
            if task.handler.is_async:  # a suspect: it must not share the loop with others
                function = async_to_sync(function)
            result, error = call(function, delivery, delivery)
            seconds = perf_counter() - began
            if self._left_transaction_open() and error is None:
                error = HandlerBrokeTransaction(
                    "the handler left a transaction open; it was rolled back"
                )
        finally:
            self._session.link.lent = False
            self._entries.end(1)
        self.settle(
            ended_nonatomic(delivery, self._policy(task.delivery._row), result, error, seconds)
        )

    def settle(self, ended: Ended) -> None:
        """Settle `ended`, and report it."""
        if settled := self._settlement.settle([ended]):
            reporting.all_ended(settled)
            self._settled(settled)
        tidy_up()

    def _left_transaction_open(self) -> bool:
        wrapper, driver = self._wrapper, self._wrapper.connection
        within = wrapper.in_atomic_block
        if driver is not None and not driver.closed and not within:
            idle = driver.info.transaction_status == TransactionStatus.IDLE
            if idle and driver.autocommit:
                self._take_back()
                return False
            within = True
        wrapper.close()
        wrapper.connection = None  # the next use makes a new one
        wrapper.in_atomic_block = False
        wrapper.autocommit = True
        return within

    def _take_back(self) -> None:
        """Reset what the handler left in the session."""
        try:
            take_back(self._wrapper)
        except psycopg.Error:
            self._wrapper.close()


class EntryClock:
    """The deadline of a running message on the scoreboard, as the supervisor sees it."""

    def __init__(self, entries: ExecutorEntries, fence: Fence) -> None:
        self._entries = entries
        self._fence = fence

    def extend(self, seconds: float) -> None:
        self._entries.start([self._fence], monotonic() + seconds, False)


def ended_nonatomic(
    delivery: LeasedDelivery,
    policy: RetryPolicy,
    result: Any,
    error: BaseException | None,
    seconds: float,
) -> Ended:
    """Return how a delivery ended; its handler may have called `finish()`."""
    if delivery.finished:
        if error is not None:
            reporting.failed_after_finish(delivery, error)
        return Ended(delivery, Settled.FINISHED, result, seconds, error=error)
    if error is None:
        return Ended(delivery, Settled.ACKED, result, seconds)
    return end(delivery, policy, error, seconds=seconds)
