"""A slice: several deliveries that run in order, inside one transaction that is opened lazily.

Django's atomic block is entered before the first handler, but nothing is sent. The first use of the
connection begins the transaction, locks that message and those that have not started, and opens a
savepoint. Messages whose handlers used the connection are settled in the transaction; the others
are settled by their fences after it, and never run again for a neighbour.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import monotonic

from django_mq.executor import reports, slice_limits
from django_mq.executor.attempts import Attempts
from django_mq.executor.calls import close_old
from django_mq.executor.connections import DATABASE_ERRORS
from django_mq.executor.ended import ACKED, Ended, Settled
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.session import Session, run_hooks
from django_mq.executor.settle_rows import settle_all
from django_mq.executor.settlement import Settlement
from django_mq.executor.simple_protocol import simple_query
from django_mq.executor.slice_body import SliceBody
from django_mq.executor.slice_recovery import SliceRecovery
from django_mq.executor.slice_state import (
    Conflicts,
    RanDeliveries,
    Remainder,
    SettleIncomplete,
    SliceAborted,
    SliceState,
)
from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.executor.tasks import Task, decode_again
from django_mq.messages import LONG_AGO, fence_of
from django_mq.signals import is_observed, message_started
from django_mq.store import settle


class SliceRunner:
    """Runs slices on one connection, in the thread that owns it.

    After a failure in one of `backoff_queues`, the rest of that queue in the slice does not start;
    nor does any delivery that `stopped_queues` has.
    """

    def __init__(
        self,
        session: Session,
        context: RunContext,
        *,
        entries: ExecutorEntries,
        settlement: Settlement,
        slice_seconds: float,
        stopped_queues: StoppedQueues,
        backoff_queues: Collection[str] = (),
    ) -> None:
        self._session = session
        self._context = context
        self._entries = entries
        self._outage = context.outage
        self._settlement = settlement
        self._slice_seconds = slice_seconds
        self._conflicts = conflicts = Conflicts()
        self._nested = nested = session.is_nested()
        attempts = Attempts(
            session,
            entries=entries,
            conflicts=conflicts,
            failure_end=context.failure_end,
            nested=nested,
            backoff_queues=backoff_queues,
        )
        self._body = SliceBody(
            session,
            entries=entries,
            attempts=attempts,
            stopped_queues=stopped_queues,
            unlocked_for=context.unlocked_for,
        )
        self._recovery = SliceRecovery(
            session,
            conflicts=conflicts,
            settlement=settlement,
            failure_end=context.failure_end,
        )

    def prepare(self) -> None:
        """Prepare the next slice while no message waits for it."""
        if not self._nested:
            self._session.prepare_block()

    def run(self, tasks: Sequence[Task]) -> Remainder:
        """Run as many of `tasks` in one transaction as time allows; return the rest."""
        state = SliceState(
            tasks,
            self._limits(tasks),
            until=monotonic() + self._slice_seconds,
            announcing=is_observed(message_started),
        )
        if not self._nested:
            self._session.drop_unless_idle()
        try:
            state.driver = driver = self._session.connect()
            self._session.check_silent()
            if not self._session.borrowed:
                state.settings.update(slice_limits.of_server(driver.info.server_version))
            with self._session.block():
                self._body.run(state)
                self._settle_bound(state)
                state.committing = state.begun
        except (SliceAborted, SettleIncomplete, *DATABASE_ERRORS) as error:
            if self._nested:  # a test's transaction cannot be recovered
                if state.culprit is not None:
                    self._context.on_settled([state.culprit])
                raise
            self._recovery.recover(state, error)
        else:
            if state.begun:
                self._outage.record_answer()
            state.settled.append(state.bound)
        if state.unbound.ended:
            state.unbound.ended = self._settlement.settle(state.unbound.ended)
            state.settled.append(state.unbound)
        for ran in state.settled:  # only now: a hook may take long, or hang
            self._finish(ran)
        if state.savepoints and not self._nested:
            self._session.discard()
        self._session.record_activity()
        return self._remainder(state)

    def _limits(self, tasks: Sequence[Task]) -> dict[str, str]:
        if self._session.borrowed:  # they would last until the end of a test's transaction
            return {}
        return slice_limits.limits(
            [task.timeout for task in tasks], slice_seconds=self._slice_seconds
        )

    def _remainder(self, state: SliceState) -> Remainder:
        not_locked = self._still_ours(state.not_locked)
        if not_locked and not state.attempted:
            self._outage.wait_quietly()  # there is nothing else to do, and the lock may last
        for task in (*state.to_rerun, *not_locked):
            task.delivery._leased_at = LONG_AGO  # from now on it is locked before it starts
            decode_again(task)
        return Remainder(state.left, state.to_rerun, not_locked, state.seconds)

    def _still_ours(self, tasks: list[Task]) -> list[Task]:
        """Return the tasks whose lease we still hold; report the others as lost."""
        if not tasks:
            return []
        try:
            fences = [task.delivery.fence for task in tasks]
            ours = settle.still_ours(self._session.cursor(), fences)
        except DATABASE_ERRORS:
            if self._nested:
                raise
            self._session.close()
            return tasks  # a later slice finds out
        for task in tasks:
            if task.delivery.id not in ours:
                reports.lease_lost(task.delivery)
                self._context.on_settled([Ended(task.delivery, Settled.LOST)])
        return [task for task in tasks if task.delivery.id in ours]

    def _settle_bound(self, state: SliceState) -> None:
        if state.bound.ended:
            keyed = any(each.delivery._row.key is not None for each in state.bound.ended)
            if keyed and not self._session.borrowed:
                # A claim that parks messages behind these holds locks that their ack needs. Both
                # take locks in the order of ids, so they do not deadlock. Wait for it: if the ack
                # failed, all of them would run again, one by one.
                own = slice_limits.worker_limits({})
                if len(state.bound.ended) > 1:
                    own += f"; {settle.ORDER_BY_ID}"
                simple_query(self._session.connect(), own)
            refused = self._conflicts.refused_effects
            skip = bool(refused) and any(each.delivery.id in refused for each in state.bound.ended)
            if settle_all(self._session.cursor(), state.bound.ended, skip_refused=skip):
                raise SettleIncomplete

    def _finish(self, ran: RanDeliveries) -> None:
        """Run the hooks of settled deliveries, then report the deliveries."""
        if ran.ended:
            if ran.hooks:
                self._run_hooks(ran)
            with self._session.reset_if_used():
                reports.settled(ran.ended, self._context)
            self._conflicts.discard(ran.ended)
        if not self._session.borrowed:
            close_old()

    def _run_hooks(self, ran: RanDeliveries) -> None:
        """Run the hooks of acked deliveries, within the timeout of their handler.

        If they hang, the supervisor ends the process. The message is done, so there is no row to
        charge.
        """
        acked = {each.delivery.id for each in ran.ended if each.settled is ACKED}
        for task in ran.tasks:
            if task.delivery.id in acked and (hooks := ran.hooks.get(task.delivery.id)):
                with self._session.reset_if_used():
                    began = monotonic()
                    fence = fence_of(task.delivery._row)
                    self._entries.start_one(fence, began + task.timeout, began)
                    try:
                        run_hooks(hooks, task.delivery, self._session.alias)
                    finally:
                        self._entries.end(1)
