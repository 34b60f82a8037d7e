"""The statements that settle ended deliveries, each by its fence."""

from __future__ import annotations

from collections.abc import Sequence

from django_mq.executor import history_rules, settle_effects
from django_mq.executor.ended import ACKED, Ended, Settled, failed_row, hold_delay, moment_or_delay
from django_mq.executor.statements import within_transaction
from django_mq.messages import fence_of
from django_mq.policy.outcomes import Snoozed
from django_mq.store import Cursor, history, settle


def settle_all(cursor: Cursor, ended: Sequence[Ended], *, skip_refused: bool = False) -> set[int]:
    """Settle deliveries by their fences; return the ids that are no longer ours.

    Also writes the effects of settling (`settle_effects`), in the same transaction; opens one if
    none is open. `skip_refused`: skips effects that the database refuses.
    """
    more = settle_effects.needing_transaction(ended)
    if not more:
        return _settle_rows(cursor, ended)
    with within_transaction(cursor):
        lost = _settle_rows(cursor, ended)
        write = settle_effects.write_skipping_refused if skip_refused else settle_effects.write
        write(cursor, [each for each in more if each.delivery.id not in lost])
    return lost


def _ack(cursor: Cursor, acked: Sequence[Ended]) -> set[int]:
    """Remove handled messages, into the history if it is kept; return their ids."""
    fences = [fence_of(each.delivery._row) for each in acked]
    kept = history_rules.handled(acked)
    if not kept:
        return settle.ack(cursor, fences)
    removed = history.ack(cursor, kept)
    if len(kept) < len(fences):
        ids = {each.fence[0] for each in kept}
        removed |= settle.ack(cursor, [fence for fence in fences if fence[0] not in ids])
    return removed


def _settle_rows(cursor: Cursor, ended: Sequence[Ended]) -> set[int]:
    lost: set[int] = set()
    acked = [each for each in ended if each.settled is ACKED]
    if acked:
        removed = _ack(cursor, acked)
        if len(removed) != len(acked):
            lost.update({each.delivery.id for each in acked} - removed)
    if len(acked) == len(ended):
        return lost
    failed = list(filter(None, map(failed_row, ended)))
    if failed:
        lost.update({row.fence.id for row in failed} - settle.fail(cursor, failed))
    released = [each.delivery.fence for each in ended if each.settled is Settled.RELEASED]
    if released:
        lost.update({fence.id for fence in released} - settle.release(cursor, released))
    if snoozes := [
        settle.SnoozedDelivery(
            each.delivery.fence, *moment_or_delay(each.outcome.after), each.outcome.reason
        )
        for each in ended
        if isinstance(each.outcome, Snoozed)
    ]:
        lost.update({each.fence.id for each in snoozes} - settle.snooze(cursor, snoozes))
    if holds := [
        settle.Hold(each.delivery.fence, each.reason, hold_delay(each.delivery._row.held_for))
        for each in ended
        if each.settled is Settled.HELD
    ]:
        lost.update({each.fence.id for each in holds} - settle.hold(cursor, holds))
    if reasons := {
        each.delivery.fence: each.reason for each in ended if each.settled is Settled.DEAD_UNSTARTED
    }:
        lost.update({fence.id for fence in reasons} - settle.dead_letter_unstarted(cursor, reasons))
    return lost
