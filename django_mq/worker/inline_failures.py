"""The failed attempts of an inline run, for the test that made it."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from django_mq.exceptions import LeaseLost, Reject, Retry
from django_mq.executor.ended import Ended, Settled
from django_mq.messages import Delivery
from django_mq.policy.outcomes import DeadLettered


class InlineFailure(NamedTuple):
    """A failed attempt; `answered`: the requester gets the error as the result."""

    delivery: Delivery
    error: BaseException
    answered: bool


def failure_of(ended: Ended) -> InlineFailure | None:
    """Return the failure of a delivery, with a note that names its message; None if it has none."""
    delivery, error = ended.delivery, ended.error
    if ended.settled is Settled.LOST:
        error = LeaseLost("the message was removed, or taken over, while it ran")
        error.__cause__ = ended.error
    elif error is None or (was_asked_for(ended) and not isinstance(error, KeyboardInterrupt)):
        return None
    add_note(
        error,
        f"raised by handler {delivery.handler}: message {delivery.id} ({delivery.type}),"
        f" queue {delivery.queue}, attempt {delivery.attempt} of {delivery.max_attempts}",
    )
    answered = delivery._row.wants_result and isinstance(ended.outcome, DeadLettered)
    return InlineFailure(delivery, error, answered)


def was_asked_for(ended: Ended) -> bool:
    """Return whether the handler chose this end by raising Snooze, Reject or Retry.

    A Retry without an attempt left is a failure, since the handler expected another attempt.

    >>> from types import SimpleNamespace
    >>> from django_mq.exceptions import Reject
    >>> was_asked_for(SimpleNamespace(error=Reject("no"), outcome=None, settled=Settled.FAILED))
    True
    """
    error = ended.error
    if isinstance(error, Retry):
        return not isinstance(ended.outcome, DeadLettered)
    return ended.settled is Settled.SNOOZED or isinstance(error, Reject)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to `error`, unless its class allows none (such as a frozen dataclass)."""
    with contextlib.suppress(Exception):
        error.add_note(note)
