"""A handler outside any transaction, in an executor's thread, under a renewed lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import psycopg
from asgiref.sync import async_to_sync
from psycopg.pq import TransactionStatus

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.messages import Fence
from django_mq.signals import message_started, wanted
from django_mq.store import leases
from django_mq.worker import reporting
from django_mq.worker.calling import call, tidy_up
from django_mq.worker.database import LOST, Outage, statement_cursor, taking_back
from django_mq.worker.ending import Ended, Settled, end, ends_or_lost, settle_all
from django_mq.worker.leased import LeasedDelivery

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.backoff import RetryPolicy
    from django_mq.messages import ClaimedRow
    from django_mq.worker.board import Places
    from django_mq.worker.tasks import Task


class Unbound:
    """Runs one delivery at a time on the executor's connection."""

    def __init__(
        self,
        wrapper: BaseDatabaseWrapper,
        *,
        places: Places,
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settled: Callable[[Sequence[Ended]], None],
        lease: Callable[[str], float],
    ) -> None:
        self._wrapper = wrapper
        self._places = places
        self._outage = outage
        self._policy = policy
        self._settled = settled
        self._lease = lease

    def run(self, task: Task) -> bool:
        """Run and settle `task`; False when it could not be started and is still in hand."""
        try:
            started = leases.start(
                self._cursor(), [task.delivery.fence], lease=self._lease(task.delivery.queue)
            )
        except (psycopg.Error, *LOST) as error:
            self._wrapper.close()
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
        clock = PlaceClock(self._places, task.delivery.fence)
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
        try:
            function = task.handler.function
            if task.handler.is_async:  # a suspect: alone, so not among others on the loop
                function = async_to_sync(function)
            result, error = call(function, delivery, delivery)
            seconds = perf_counter() - began
            if self._left_transaction_open() and error is None:
                error = HandlerBrokeTransaction(
                    "the handler left a transaction open; it was rolled back"
                )
        finally:
            self._places.end(1)
        self.settle(
            ended_unbound(delivery, self._policy(task.delivery._row), result, error, seconds)
        )

    def settle(self, ended: Ended) -> None:
        """Write down how it ended; for as long as the database is away, try again."""
        while True:
            try:
                lost = settle_all(self._cursor(), [ended])
                break
            except (psycopg.Error, *LOST) as error:
                self._wrapper.close()
                if not isinstance(error, LOST):
                    reporting.refused([ended], error)
                    self._settled([Ended(ended.delivery, Settled.LOST)])
                    return
                self._outage.wait(error)
                if self._outage.stopped():
                    return  # the lease lapses, and the attempt counts
        self._outage.over()
        if lost:
            reporting.lease_lost(ended.delivery)
        else:
            reporting.one_ended(ended)
        self._settled(ends_or_lost([ended], lost))
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
        wrapper.connection = None  # the next use makes a new one, and all else as it was
        wrapper.in_atomic_block = False
        wrapper.autocommit = True
        return within

    def _take_back(self) -> None:
        """Undo what the handler SET for the session."""
        try:
            psycopg.ClientCursor(self._wrapper.connection).execute(taking_back(self._wrapper))
        except psycopg.Error:
            self._wrapper.close()

    def _cursor(self) -> psycopg.Cursor[Any]:
        self._wrapper.ensure_connection()
        return statement_cursor(self._wrapper.connection)


class PlaceClock:
    """The deadline of one message that runs, as its supervisor sees it."""

    def __init__(self, places: Places, fence: Fence) -> None:
        self._places = places
        self._fence = fence

    def extend(self, seconds: float) -> None:
        self._places.start([self._fence], monotonic() + seconds, False)


def ended_unbound(
    delivery: LeasedDelivery,
    policy: RetryPolicy,
    result: Any,
    error: BaseException | None,
    seconds: float,
) -> Ended:
    """Say how a delivery ended whose handler may have finished it itself."""
    if delivery.finished:
        if error is not None:
            reporting.failed_after_finish(delivery, error)
        return Ended(delivery, Settled.FINISHED, result, seconds, error=error)
    if error is None:
        return Ended(delivery, Settled.ACKED, result, seconds)
    return end(delivery, policy, error, seconds=seconds)
