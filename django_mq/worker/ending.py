"""How each delivery ended, and the statements that make it so."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus

from django_mq.exceptions import UnreadablePayload
from django_mq.messages import fence_of
from django_mq.outcomes import DeadLettered, Outcome, Retried, Snoozed, decide, one_line
from django_mq.store import Cursor, settle
from django_mq.worker import consequences

if TYPE_CHECKING:
    from django_mq.backoff import RetryPolicy
    from django_mq.messages import Delivery

#: Seconds until a held message is looked at again: 1, doubling to this, by how long it is held.
LONGEST_HOLD = 300.0


class Settled(Enum):
    """What becomes of a delivery.

    FINISHED: its handler acked it with its own last writes. LOST: it is no longer ours.
    """

    ACKED = auto()
    FINISHED = auto()
    FAILED = auto()
    SNOOZED = auto()
    HELD = auto()
    BURIED = auto()
    LOST = auto()


#: As a name of the module it costs a fifth of the attribute (Python 3.11).
ACKED = Settled.ACKED
#: The handler did its work.
DONE = (Settled.ACKED, Settled.FINISHED)
#: Nothing of it is in its queue any more, or it is not ours to say.
NOT_BACK = (*DONE, Settled.LOST)


class Ended(NamedTuple):
    """One delivery that ended: `outcome` of a failure or snooze, `reason` of one that never ran."""

    delivery: Delivery
    settled: Settled
    result: Any = None
    seconds: float = 0.0
    outcome: Outcome | None = None
    error: BaseException | None = None
    reason: str = ""


def end(delivery: Delivery, policy: RetryPolicy, error: BaseException, *, seconds: float) -> Ended:
    """Decide what becomes of a delivery whose handler raised `error` after `seconds`."""
    if isinstance(error, UnreadablePayload):
        return Ended(delivery, Settled.HELD, seconds=seconds, reason=one_line(str(error)))
    outcome = decide(
        attempt=delivery.attempt,
        max_attempts=delivery.max_attempts,
        policy=policy,
        random=random.random,
        error=error,
    )
    settled = Settled.SNOOZED if isinstance(outcome, Snoozed) else Settled.FAILED
    return Ended(delivery, settled, seconds=seconds, outcome=outcome, error=error)


def settle_all(cursor: Cursor, ended: Sequence[Ended]) -> set[int]:
    """Settle deliveries by their fences; return the ids of those that are no longer ours.

    What else follows is done in the same transaction: one is opened where none is.
    """
    more = consequences.having_any(ended)
    if not more:
        return _settle_rows(cursor, ended)
    with within_transaction(cursor):
        lost = _settle_rows(cursor, ended)
        consequences.follow(cursor, [each for each in more if each.delivery.id not in lost])
    return lost


def within_transaction(cursor: Cursor) -> AbstractContextManager[Any]:
    """Return a block that is one transaction: the one that is open, else one of its own."""
    driver: psycopg.Connection[Any] = cursor.connection
    if driver.info.transaction_status == TransactionStatus.IDLE:
        return driver.transaction()
    return nullcontext()


def _settle_rows(cursor: Cursor, ended: Sequence[Ended]) -> set[int]:
    lost: set[int] = set()
    acked = [fence_of(each.delivery._row) for each in ended if each.settled is ACKED]
    if acked:
        gone = settle.ack(cursor, acked)
        if len(gone) != len(acked):
            lost.update({fence[0] for fence in acked} - gone)
    if len(acked) == len(ended):
        return lost
    failed = list(filter(None, map(failed_row, ended)))
    if failed:
        lost.update({row.fence.id for row in failed} - settle.fail(cursor, failed))
    for each in ended:
        fence = each.delivery.fence
        if isinstance(each.outcome, Snoozed):
            at, delay = _when(each.outcome.after)
            changed = settle.snooze(cursor, fence, at=at, delay=delay)
        elif each.settled is Settled.HELD:
            delay = hold_delay(each.delivery._row.held_for)
            changed = settle.hold(cursor, fence, reason=each.reason, delay=delay)
        elif each.settled is Settled.BURIED:
            changed = settle.bury(cursor, fence, reason=each.reason)
        else:
            continue
        if not changed:
            lost.add(fence.id)
    return lost


def failed_row(ended: Ended, *, suspect: bool = False) -> settle.Failed | None:
    """Return what the store writes of a failed attempt; None for any other end."""
    outcome = ended.outcome
    if isinstance(outcome, DeadLettered):
        at, delay, dead_reason = None, 0.0, outcome.reason
    elif isinstance(outcome, Retried):
        (at, delay), dead_reason = _when(outcome.after), ""
    else:
        return None
    failure = outcome.failure
    return settle.Failed(
        fence=ended.delivery.fence,
        at=at,
        delay=delay,
        dead_reason=dead_reason,
        error_class=failure.error_class,
        error_text=failure.text,
        traceback=failure.traceback,
        last_error=failure.summary,
        seconds=ended.seconds,
        suspect=suspect and not dead_reason,
    )


def ends_or_lost(ended: Sequence[Ended], lost: Collection[int]) -> list[Ended]:
    """Return `ended` with those of `lost` marked so."""
    return [
        each._replace(settled=Settled.LOST) if each.delivery.id in lost else each for each in ended
    ]


def any_back(ended: Sequence[Ended]) -> bool:
    """Say whether one of these is back in its queue, to run again."""
    others = [each.settled for each in ended if each.settled is not ACKED]
    return any(settled not in NOT_BACK for settled in others)


def hold_delay(held_for: float | None) -> float:
    """Return after how many seconds a message held since `held_for` seconds is looked at again.

    1 s at first, and never longer than it was held so far, so that the waits double; at most
    5 minutes.

    >>> hold_delay(None), hold_delay(1.0), hold_delay(3.1), hold_delay(9000.0)
    (1.0, 1.0, 3.1, 300.0)
    """
    return min(max(1.0, held_for or 0.0), LONGEST_HOLD)


def _when(after: float | datetime) -> tuple[datetime | None, float]:
    return (after, 0.0) if isinstance(after, datetime) else (None, after)
