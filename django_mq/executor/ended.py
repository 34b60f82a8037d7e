"""The end of a delivery: values, and the decision about a failure."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple

from django_mq.exceptions import UnreadablePayload
from django_mq.messages import Delivery
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.chosen_end import chosen_end
from django_mq.policy.outcomes import DeadLettered, Outcome, Retried, Snoozed, decide
from django_mq.policy.plain_text import one_line
from django_mq.store import settle

#: The longest wait, in seconds, before a worker looks at a held message again.
MAX_HOLD = 300.0


class Settled(Enum):
    """The ends of a delivery.

    FINISHED: its handler acked it with `finish()`. FAILED: to be retried or dead, as its `outcome`
    says. DEAD_UNSTARTED: dead without an attempt, expired or held for too long. RELEASED: it runs
    again after the message before it in its line, and uses no attempt. LOST: the lease is no longer
    ours.
    """

    ACKED = auto()
    FINISHED = auto()
    FAILED = auto()
    SNOOZED = auto()
    HELD = auto()
    DEAD_UNSTARTED = auto()
    RELEASED = auto()
    LOST = auto()


#: Reading a module's name takes a fifth of the time of reading an enum's attribute (Python 3.11).
ACKED = Settled.ACKED
#: The handler did its work.
DONE = (Settled.ACKED, Settled.FINISHED)
#: The message is no longer in its queue, or its lease is no longer ours.
REMOVED_OR_LOST = (*DONE, Settled.LOST)


class Ended(NamedTuple):
    """How a delivery ended.

    `outcome` describes a failure or a snooze, `reason` says why the message is held or dead.
    """

    delivery: Delivery
    settled: Settled
    result: Any = None
    seconds: float = 0.0
    outcome: Outcome | None = None
    error: BaseException | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the message is done or dead: it does not run again by itself."""
        if self.settled is Settled.FAILED:
            return isinstance(self.outcome, DeadLettered)
        return self.settled in DONE or self.settled is Settled.DEAD_UNSTARTED


#: Decides the outcome of a delivery whose handler raised an error after some seconds.
FailureEnd = Callable[[Delivery, BaseException, float], Ended]


def failure_end(
    delivery: Delivery, policy: RetryPolicy, error: BaseException, *, seconds: float
) -> Ended:
    """Decide the outcome of a delivery whose handler raised `error` after `seconds`."""
    error = chosen_end(error)
    # Not isinstance(): it reads `__class__`, and a handler's exception may refuse that.
    if issubclass(type(error), UnreadablePayload):
        return Ended(delivery, Settled.HELD, seconds=seconds, reason=one_line(str(error)))
    outcome = decide(
        error,
        attempt=delivery.attempt,
        max_attempts=delivery.max_attempts,
        policy=policy,
        random=random.random,
        message_id=delivery.id,
    )
    settled = Settled.SNOOZED if isinstance(outcome, Snoozed) else Settled.FAILED
    return Ended(delivery, settled, seconds=seconds, outcome=outcome, error=error)


def failed_row(ended: Ended, *, suspect: bool = False) -> settle.FailedDelivery | None:
    """Return the row of a failed attempt for the store; None for any other end."""
    outcome = ended.outcome
    if isinstance(outcome, DeadLettered):
        at, delay, dead_reason = None, 0.0, outcome.reason
    elif isinstance(outcome, Retried):
        (at, delay), dead_reason = moment_or_delay(outcome.after), ""
        delay = max(delay, outcome.min_wait)
    else:
        return None
    failure = outcome.failure
    return settle.FailedDelivery(
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
        place=failure.place,
    )


def ends_or_lost(ended: Sequence[Ended], lost: Collection[int]) -> list[Ended]:
    """Return `ended`, with deliveries marked LOST whose ids are in `lost`."""
    if not lost:
        return list(ended)
    return [
        each._replace(settled=Settled.LOST) if each.delivery.id in lost else each for each in ended
    ]


def any_row_kept(ended: Sequence[Ended]) -> bool:
    """Return whether any row was kept: neither done nor lost. Dead letters count, too."""
    others = [each.settled for each in ended if each.settled is not ACKED]
    return any(settled not in REMOVED_OR_LOST for settled in others)


def hold_delay(held_for: float | None) -> float:
    """Return the seconds to wait before a message held for `held_for` seconds is looked at again.

    At first 1 s, then 1 s more than the message has been held, so that waits double: 1, 2, 4 s
    and so on; at most 5 minutes.

    >>> hold_delay(None), hold_delay(1.0), hold_delay(3.0), hold_delay(9000.0)
    (1.0, 2.0, 4.0, 300.0)
    """
    return min(1.0 + max(0.0, held_for or 0.0), MAX_HOLD)


def moment_or_delay(after: float | datetime) -> tuple[datetime | None, float]:
    """Return a time in the form that the store takes: a moment, or seconds from now."""
    return (after, 0.0) if isinstance(after, datetime) else (None, after)
