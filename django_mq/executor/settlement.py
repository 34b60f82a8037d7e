"""Settle deliveries by their fences, and retry a failed settle.

The loop handles five failures:

- connection lost: wait for the database;
- a right is missing: wait until the login has it;
- transaction committed after all: count it;
- conflict, or one bad row among several: settle each individually;
- refused by the server: report it, and let the retry policy decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from time import monotonic

from psycopg.errors import LockNotAvailable

from django_mq.executor import history_rules, reports, settle_effects
from django_mq.executor.calls import is_conflict
from django_mq.executor.ended import ACKED, Ended, Settled, ends_or_lost
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.leased_delivery import leased_at
from django_mq.executor.run_context import RunContext
from django_mq.executor.session import Session
from django_mq.executor.settle_rows import settle_all
from django_mq.executor.simple_protocol import rows_of, simple_results
from django_mq.executor.statements import Statements
from django_mq.messages import fence_of
from django_mq.policy.missing_right import is_missing_right
from django_mq.store import Cursor, history, open_transaction, settle
from django_mq.store.history import HandledDelivery
from django_mq.store.row_locks import LOCK_WAIT_SECONDS
from django_mq.store.server_errors import LOST

#: Conflicts of one delivery with other transactions, after which the next counts as a refusal.
MAX_CONFLICTS = 20
#: Seconds for which a settle of several deliveries is tried again because other sessions have
#: locked their rows; after that, each remaining delivery is tried once.
LOCKED_SECONDS = MAX_CONFLICTS * LOCK_WAIT_SECONDS

#: A connection that nothing else uses during a settle.
SettleConnection = Session | Statements


class _Undo(Exception):
    """Ends a transaction whose writes are not kept."""


@dataclass(slots=True)
class _Try:
    """One try to settle: its transaction, and the ids of the messages whose leases were lost."""

    xid: str | None = None
    lost: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Tries:
    """The findings of earlier tries to settle the same deliveries."""

    #: Whether an earlier try may have been committed.
    unconfirmed: bool = False
    #: From this time on (`monotonic()`), a locked row is tried once.
    once_after: float = float("inf")
    #: Whether to skip effects that the database refuses.
    skip_refused: bool = False
    conflicts: int = 0
    #: Errors of a lost database that the connection survived.
    survived: int = 0


class _Next(Enum):
    """How to go on after a try."""

    FINISH = auto()
    AGAIN = auto()
    SINGLY = auto()
    REFUSE = auto()
    GIVE_UP = auto()


class Settlement:
    """Settles deliveries by their fences, in transactions of their own.

    After a try whose outcome is unknown, a missing row counts as acked by that try if its delivery
    was claimed or renewed less than the shortest lease ago: no other worker removes a leased row.
    """

    def __init__(self, connection: SettleConnection, context: RunContext) -> None:
        self._connection = connection
        self._context = context
        self.outage = context.outage

    def settle(self, ended: Sequence[Ended]) -> list[Ended]:
        """Settle `ended`; return them, marked LOST where the lease is no longer ours.

        Waits for a lost database. Returns an empty list if the drain ends meanwhile: the leases
        lapse, and the attempts count. Sends nothing if `finish()` has settled all of them.
        """
        if all(each.settled is Settled.FINISHED for each in ended):
            return list(ended)
        return self._settle(ended, _Tries())

    def _settle(self, ended: Sequence[Ended], tries: _Tries) -> list[Ended]:
        while True:
            tried = _Try()
            try:
                self._write(ended, tried, tries)
                after = _Next.FINISH
            except Exception as error:  # of any kind: the delivery must get an end
                after = self._next(ended, tried, tries, error)
                if after is _Next.REFUSE:
                    return self._refused(ended[0], error)
            if after is _Next.FINISH:
                self.outage.record_answer()
                return _reported_ends(ended, tried.lost)
            if after is _Next.SINGLY:
                return self._settle_singly(ended, tries)
            if after is _Next.GIVE_UP:
                return []

    def _next(self, ended: Sequence[Ended], tried: _Try, tries: _Tries, error: Exception) -> _Next:
        """Return what follows a try that failed; waits before another one, if the error asks."""
        alive = self._connection.is_alive()
        effects = settle_effects.needing_transaction(ended)
        if is_missing_right(error) and (tries.skip_refused or not effects):
            return self._wait(error)
        if isinstance(error, LOST) and not is_conflict(error):
            self._connection.close()
            changed = [each for each in ended if each.delivery.id not in tried.lost]
            if not alive and self.was_committed(tried.xid, changed):
                return _Next.FINISH
            tries.unconfirmed |= not alive
            tries.survived += alive
            if tries.survived <= MAX_CONFLICTS:
                return self._wait(error)
        if len(ended) > 1:
            return _Next.SINGLY
        tries.conflicts += 1
        is_kept = isinstance(error, LockNotAvailable) and (
            monotonic() > tries.once_after or self.outage.stopped()
        )
        if is_conflict(error) and not is_kept and tries.conflicts <= MAX_CONFLICTS:
            return _Next.AGAIN
        if tries.skip_refused or is_kept or not effects:
            return _Next.REFUSE
        tries.skip_refused, tries.conflicts, tries.survived = True, 0, 0
        return _Next.AGAIN

    def _wait(self, error: Exception) -> _Next:
        self.outage.wait(error)
        return _Next.GIVE_UP if self.outage.stopped() else _Next.AGAIN

    def wait_for_right(
        self, ended: Sequence[Ended], error: Exception, *, skip_refused: bool
    ) -> None:
        """Wait while the login lacks a right that settling `ended` needs; settle nothing.

        Handlers are rerun only after the right is granted, because a rerun repeats their effects
        outside the database.
        """
        while is_missing_right(error) and not self.outage.stopped():
            self.outage.wait(error)
            try:
                cursor = self._connection.cursor()
                with self._connection.transaction():
                    open_transaction.begin_with_lock_wait(cursor)
                    settle_all(cursor, ended, skip_refused=skip_refused)
                    raise _Undo
            except Exception as now:
                error = now

    def _settle_singly(self, ended: Sequence[Ended], tries: _Tries) -> list[Ended]:
        once_after = monotonic() + LOCKED_SECONDS
        alone = [self._settle([each], _Tries(tries.unconfirmed, once_after)) for each in ended]
        return [done for settled in alone for done in settled]

    def was_committed(self, xid: str | None, changed: Sequence[Ended] = ()) -> bool:
        """Return whether transaction `xid`, which settled `changed`, was committed.

        Asks until the server knows. A server that crashed, or its successor after a failover, may
        have given the lost id to another transaction: if a row still has our claim, it did. If the
        claim was lost as well, an acked row that is still there shows it.
        """
        fences = [each.delivery.fence for each in changed]
        acked = [each.delivery.id for each in changed if each.settled is ACKED]
        while xid is not None and not self.outage.stopped():
            try:
                cursor = self._connection.cursor()
                status = open_transaction.transaction_status(cursor, xid)
                if status == "committed":
                    kept = settle.still_ours(cursor, fences) | settle.existing(cursor, acked)
                    return not kept
            except LOST as error:
                self._connection.close()
                self.outage.wait(error)
                continue
            if status != "in progress":
                return False
            self.outage.wait_quietly()
        return False

    def _write(self, ended: Sequence[Ended], tried: _Try, tries: _Tries) -> None:
        cursor = self._connection.cursor()
        acked = list(map(attrgetter("settled"), ended)).count(ACKED)
        if acked == len(ended) and not settle_effects.needing_transaction(ended):
            kept = history_rules.handled(ended)
            if not kept or len(kept) == len(ended):
                self._ack_alone(cursor, ended, kept, tried, unconfirmed=tries.unconfirmed)
                return
        with self._connection.transaction():
            tried.xid = open_transaction.begin_with_lock_wait(cursor)
            tried.lost = settle_all(cursor, ended, skip_refused=tries.skip_refused)

    def _ack_alone(
        self,
        cursor: Cursor,
        ended: Sequence[Ended],
        kept: Sequence[HandledDelivery],
        tried: _Try,
        *,
        unconfirmed: bool,
    ) -> None:
        """Ack in a transaction of one round trip; `kept` is the history of all, or empty."""
        fences = [fence_of(each.delivery._row) for each in ended]
        ack = history.ack_alone(kept) if kept else settle.ack_alone(fences)
        removed = simple_results(cursor.connection, ack)
        if sum(each.ntuples for each in removed) == len(fences):
            return
        tried.lost = {fence[0] for fence in fences}.difference(
            int(id or 0) for (id,) in rows_of(removed)
        )
        if unconfirmed:
            there = settle.existing(cursor, tried.lost)
            fresh_since = lease_clock() - self._context.shortest_lease
            tried.lost -= {
                each.delivery.id
                for each in ended
                if each.delivery.id not in there and leased_at(each.delivery) > fresh_since
            }

    def _refused(self, ended: Ended, error: Exception) -> list[Ended]:
        """Handle an end that the server refuses: fail an acked one, else let the lease lapse."""
        fails = ended.settled is ACKED and not is_conflict(error)
        reports.refused(ended.delivery, error, fails=fails)
        if fails:
            failed = self._context.failure_end(ended.delivery, error, ended.seconds)
            return self.settle([failed])
        return ends_or_lost([ended], {ended.delivery.id})


def _reported_ends(ended: Sequence[Ended], lost: set[int]) -> list[Ended]:
    for each in ended if lost else ():
        if each.delivery.id in lost:
            reports.lease_lost(each.delivery)
    return ends_or_lost(ended, lost)
