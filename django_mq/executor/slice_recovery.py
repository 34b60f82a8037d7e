"""Recover a slice whose transaction failed as a whole: charge nothing twice, lose nothing.

Bound deliveries that had run, run again; if the transaction turns out to be committed, they are
settled instead. Unbound deliveries are settled afterwards, as after any slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django_mq.executor import reports, settle_effects
from django_mq.executor.calls import is_conflict
from django_mq.executor.ended import Ended, FailureEnd, Settled
from django_mq.executor.session import Session
from django_mq.executor.settlement import Settlement
from django_mq.executor.slice_state import Conflicts, RanDeliveries, SettleIncomplete, SliceState
from django_mq.executor.tasks import decode_again
from django_mq.policy.missing_right import is_missing_right
from django_mq.store.server_errors import LOST


@dataclass(slots=True)
class SliceRecovery:
    """Recovers slices on one session.

    `failure_end` decides the outcome of a failure. Settled deliveries are added to the state.
    """

    session: Session
    conflicts: Conflicts
    settlement: Settlement
    failure_end: FailureEnd

    def recover(self, state: SliceState, error: Exception) -> None:
        """Decide what happens to the deliveries of a slice whose transaction ended with `error`."""
        state.left = state.unstarted()
        if state.aborted:
            self._transaction_ended(state)
        elif isinstance(error, SettleIncomplete):
            self._settle_incomplete(state)
        else:
            self._statement_failed(state, error)

    def _settle_incomplete(self, state: SliceState) -> None:
        """Run each bound delivery again, alone: a lease was lost before its row was settled."""
        bound = state.bound
        if len(bound.tasks) == 1 and not state.to_rerun:
            reports.lease_lost(bound.tasks[0].delivery)
            bound.ended = [Ended(bound.tasks[0].delivery, Settled.LOST)]
            state.settled.append(bound)
        else:
            state.rerun_bound()

    def _transaction_ended(self, state: SliceState) -> None:
        """Handle a transaction that a handler ended, or whose connection was lost.

        Does not ask for the outcome of a lost session's transaction: a server that crashed reuses
        ids that it had not written to disk, so another transaction with that id may have been
        committed.
        """
        ended_by_hand = state.driver is not None and not state.driver.closed
        self.session.close()
        if ended_by_hand and state.bound.ended and self.settlement.was_committed(state.xid):
            self._settle(state.bound, state)
        else:
            state.left[:0] = state.bound.tasks
            for task in state.bound.tasks:
                decode_again(task)
            state.bound.clear()
        if state.culprit is not None:
            self._settle(RanDeliveries(ended=[state.culprit]), state)

    def _statement_failed(self, state: SliceState, error: Exception) -> None:
        """Handle a statement of ours, or a COMMIT, that the server refused or did not answer."""
        answered = state.driver is not None and not state.driver.closed
        if state.committing and not answered:
            self.session.close()
            if self.settlement.was_committed(state.xid, state.bound.ended):
                state.settled.append(state.bound)
            else:
                self._connection_lost(state, error)
        elif not answered or (isinstance(error, LOST) and not is_conflict(error)):
            self.session.close()
            self.settlement.outage.wait(error)
            self._connection_lost(state, error)
        elif self._lacks_right(state, error):
            self._wait_for_right(state, error)
        elif state.bound.tasks or state.to_rerun or is_conflict(error):
            self._run_again_or_fail(state, error)
        else:  # nothing can begin: our permissions or the tables are wrong
            self.session.close()
            self.settlement.outage.wait(error)

    def _connection_lost(self, state: SliceState, error: Exception) -> None:
        """Run each bound delivery again, alone; fail one that lost its connection too often."""
        failed = RanDeliveries()
        for task, each in zip(state.bound.tasks, state.bound.ended, strict=True):
            if self.conflicts.count_loss(task):
                failed.ended.append(self.failure_end(task.delivery, error, each.seconds))
            else:
                state.to_rerun.append(task)
        state.bound.clear()
        if failed.ended:
            self._settle(failed, state)

    def _lacks_right(self, state: SliceState, error: Exception) -> bool:
        """Return whether the login lacks a right to settle; effects of a settle can be skipped."""
        ended = state.bound.ended
        if not ended or not is_missing_right(error):
            return False
        return self._effects_are_skipped(ended) or not settle_effects.needing_transaction(ended)

    def _wait_for_right(self, state: SliceState, error: Exception) -> None:
        """Run the bound deliveries again, uncharged, once the login has the right."""
        ended = state.bound.ended
        self.settlement.wait_for_right(ended, error, skip_refused=self._effects_are_skipped(ended))
        state.rerun_bound()

    def _effects_are_skipped(self, ended: Sequence[Ended]) -> bool:
        return all(each.delivery.id in self.conflicts.refused_effects for each in ended)

    def _run_again_or_fail(self, state: SliceState, error: Exception) -> None:
        tasks, ended = state.bound.tasks, state.bound.ended
        if (
            len(tasks) != 1
            or state.to_rerun
            or self.conflicts.may_repeat(tasks, error)
            or (not state.committing and self._can_skip_effects(ended[0]))
        ):
            state.rerun_bound()
        else:
            failed = self.failure_end(ended[0].delivery, error, ended[0].seconds)
            self._settle(RanDeliveries(ended=[failed]), state)

    def _can_skip_effects(self, ended: Ended) -> bool:
        """Return whether to run it once more, in case only its effects are refused."""
        id, refused = ended.delivery.id, self.conflicts.refused_effects
        if id in refused or not settle_effects.needing_transaction([ended]):
            return False
        refused.add(id)
        return True

    def _settle(self, ran: RanDeliveries, state: SliceState) -> None:
        """Settle deliveries by fence, in a new transaction: their own transaction has ended."""
        ran.ended = self.settlement.settle(ran.ended)
        state.settled.append(ran)
