"""Run a handler outside any transaction, in an executor's thread, under a renewed lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import psycopg

from django_mq.conf.error_logs import log_failure
from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor import reports
from django_mq.executor.call_timeout import EntryTimeout
from django_mq.executor.calls import call as run_handler
from django_mq.executor.calls import close_old
from django_mq.executor.connections import drop_connection, is_idle, is_in_pipeline, roll_back
from django_mq.executor.ended import Ended, Settled
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.leased_call import LeasedCall, leased_call, split_started
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session
from django_mq.executor.settlement import Settlement
from django_mq.executor.simple_protocol import simple_query
from django_mq.executor.tasks import Task
from django_mq.messages import Fence
from django_mq.signals import is_observed, message_started
from django_mq.store import leases, settle
from django_mq.store.server_errors import LOST


class RowLocked(Exception):
    """Another session has locked the row of a message that is still ours."""


@dataclass(slots=True)
class NonAtomic:
    """Makes one call at a time on the executor's connection."""

    session: Session
    context: RunContext
    entries: ExecutorEntries
    settlement: Settlement

    def run(self, tasks: Sequence[Task]) -> bool:
        """Run and settle one call; return False if it could not start and is still unsettled.

        `tasks` has one task, or the tasks of one batch handler in order.
        """
        fences = [task.delivery.fence for task in tasks]
        lease = max(map(self.context.lease_of, {task.delivery.queue for task in tasks}))
        asked_at = lease_clock()
        try:
            self.session.check_silent()
            started = self._start(fences, lease)
        except LOST as error:
            self.session.close()
            self.context.outage.wait(error)
            return False
        except RowLocked:
            self.context.outage.wait_quietly()  # perhaps nothing else waits, and the lock may last
            return False
        self.context.outage.record_answer()
        self.session.record_activity()
        barred, ready = split_started(tasks, started, asked_at=asked_at)
        lost = [each for each in barred if each.settled is Settled.LOST]
        if lost:
            for each in lost:
                reports.lease_lost(each.delivery)
            self.context.on_settled(lost)
        if over := [each for each in barred if each.settled is not Settled.LOST]:
            self.settle(over)
        if ready:
            self._run_started(ready, lease)
        return True

    def _start(self, fences: Sequence[Fence], lease: float) -> dict[int, bool]:
        """Give each message a full lease, except those that the server refuses to change.

        Raises RowLocked if none may start yet.
        """
        asked = leases.start_alone(fences, lease=lease)
        try:
            started = leases.parse_start_result(simple_query(self.session.connect(), asked))
            missing = [fence for fence in fences if fence.id not in started]
            if missing and settle.still_ours(self.session.cursor(), missing):
                raise RowLocked
            return started
        except LOST:
            raise
        except psycopg.Error as error:
            roll_back(self.session.connect())
            if len(fences) == 1:
                id = fences[0].id
                log_failure("start_refused", error, "message %s cannot start", id, message_id=id)
                return {}
        return {
            id: expired for fence in fences for id, expired in self._start([fence], lease).items()
        }

    def _run_started(self, tasks: Sequence[Task], lease: float) -> None:
        handler = tasks[0].handler
        timeout = EntryTimeout(self.entries.of_call([task.delivery.fence for task in tasks]))
        call = leased_call(tasks, alias=self.session.alias, lease=lease, timeout=timeout)
        self.session.savepoint.watch()
        if is_observed(message_started):
            for delivery in call.deliveries:
                reports.started(delivery)
        timeout.extend(tasks[0].timeout)
        began = perf_counter()
        self.session.link.in_handler = True
        try:
            result, error = run_call(handler.call, call, alias=self.session.alias)
            seconds = perf_counter() - began
            self.session.savepoint.disarm()  # the next uses are ours
            if self._left_transaction_open() and error is None:
                error = HandlerBrokeTransaction(
                    "the handler left a transaction or a pipeline open; it was rolled back"
                )
        finally:
            self.session.link.in_handler = False
            timeout.end()
        self.settle(call.end(self.context.failure_end, result, error, seconds))

    def settle(self, ended: Sequence[Ended]) -> None:
        """Settle `ended`, and report it."""
        if settled := self.settlement.settle(ended):
            with self.session.reset_if_used():
                reports.settled(settled, self.context)
        close_old()

    def _left_transaction_open(self) -> bool:
        wrapper, driver = self.session.wrapper, self.session.wrapper.connection
        within = wrapper.in_atomic_block
        if driver is not None and not driver.closed and not within:
            if is_idle(driver) and not is_in_pipeline(driver):
                if self.session.savepoint.opened:
                    self.session.reset()
                return False
            within = True
        drop_connection(wrapper)
        return within


def run_call(
    function: Callable[[Any], Any], call: LeasedCall, *, alias: str, in_test: bool = False
) -> tuple[Any, BaseException | None]:
    """Return the result and the error of the call; a handler is never called with an empty list."""
    if isinstance(call.argument, list) and not call.argument:
        return None, None
    delivery = call.deliveries[0]
    return run_handler(function, call.argument, delivery, alias=alias, in_test=in_test)
