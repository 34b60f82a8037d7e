"""Decide the outcome of a delivery from its handler's error. Nothing here writes or waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django_mq.exceptions import Reject, Retry, Snooze, TooManyHops, UnexpectedPayload
from django_mq.policy.backoff import MAX_WAIT, BackoffFailed, Random, RetryPolicy
from django_mq.policy.durations import precise_span
from django_mq.policy.error_text import Failure, describe
from django_mq.policy.plain_text import one_line
from django_mq.policy.stack import Frame
from django_mq.policy.time_limits import TimeLimit
from django_mq.values import checked_when

#: Seconds that a message waits if the callable of its policy fails.
WAIT_WITHOUT_POLICY = 1.0
#: The `dead_reason` of a message whose last attempt failed.
EXHAUSTED = "exhausted"


class AttemptEnded(Exception):
    """An attempt was ended from outside; passed to `decide()`, never raised by a handler.

    It says nothing about the services on which a handler depends, so it signals no queue backoff.
    `stack` has the calls of the handler, as far as they are known.
    """

    stack: Sequence[Frame] = ()


class TimedOut(AttemptEnded):
    """The handler ran past its timeout."""


class Stopped(AttemptEnded):
    """An operator stopped the handler while it ran."""


class WorkerLost(AttemptEnded):
    """The worker's process died, or was lost, while the handler ran."""


def cut_short(by: str | None, ran: float = 0.0, limit: TimeLimit | None = None) -> AttemptEnded:
    """Return the error of an attempt that was stopped `by` an operator, or (None) at its timeout.

    `ran`: the seconds that the handler ran, 0 if unknown. `limit`: its timeout, if known.

    >>> str(cut_short("ana")), str(cut_short(""))
    ('stopped by ana', 'stopped by an operator')
    >>> str(cut_short(None, 2.004))
    'the handler ran for 2 s, past its timeout: the option timeout, or the setting TIMEOUT'
    >>> str(cut_short(None, 2.004, TimeLimit(2.0, is_option=True, can_move=False)))
    'the handler ran for 2 s, past its timeout: the option timeout, 2 s'
    """
    if by is None:
        seconds = f" for {precise_span(ran)}," if ran else ""
        words = limit.words(ran) if limit else "the option timeout, or the setting TIMEOUT"
        return TimedOut(f"the handler ran{seconds} past its timeout: {words}")
    return Stopped(f"stopped by {by or 'an operator'}")


@dataclass(frozen=True, slots=True)
class Retried:
    """Run again at `after` (seconds from now, or a moment); the attempt counts.

    `backoff`: the failure also signals queue backoff. `warning`: a text for the log, or empty.
    `min_wait`: the minimum number of seconds before it runs, even if `after` is sooner.
    """

    after: float | datetime
    failure: Failure
    backoff: bool
    warning: str = ""
    min_wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Snoozed:
    """Run again at `after` (seconds from now, or a moment); the attempt does not count.

    `backoff`: it also signals queue backoff. `warning`: a text for the log, or empty. `reason`: one
    line for operators, or empty.
    """

    after: float | datetime
    warning: str = ""
    backoff: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Never run again: `reason` is one line, `exhausted` or the reason of `Reject`."""

    reason: str
    failure: Failure


Outcome = Retried | Snoozed | DeadLettered


def decide(
    error: BaseException,
    *,
    attempt: int,
    max_attempts: int,
    policy: RetryPolicy,
    random: Random,
    message_id: int | None = None,
) -> Outcome:
    """Return the outcome of a delivery whose handler raised `error`.

    `attempt` counts from 1; the attempt `max_attempts` is the last. `max_attempts` is the message's
    (a requeue raises it), so `policy` provides only the delay. `random` returns a number in [0, 1).
    A wait is cut to 366 days, and raised to the floor of `policy`. A TooManyHops is final if it
    names `message_id`, and not the neighbour in a list whose chain is too long. This function never
    raises, whatever `error` is.

    >>> decide(
    ...     KeyError(7), attempt=1, max_attempts=1, policy=RetryPolicy(), random=lambda: 0.5
    ... )  # doctest: +ELLIPSIS
    DeadLettered(reason='exhausted', failure=Failure(error_class='KeyError', text='7', ...))
    """
    asked: float | datetime | None = None
    backoff = True
    stack: Sequence[Frame] = ()
    try:
        if isinstance(error, Snooze):
            return Snoozed(*_cut(checked_when(error.after)), bool(error.backoff), _reason(error))
        if isinstance(error, Reject):
            return DeadLettered(one_line(error.reason) or "rejected", describe(error))
        if isinstance(error, UnexpectedPayload):
            return DeadLettered(one_line(f"InvalidPayload: {error}"), describe(error))
        if (
            isinstance(error, TooManyHops)
            and message_id is not None
            and error.message_id == message_id
        ):
            return DeadLettered(one_line(f"TooManyHops: {error}"), describe(error))
        if isinstance(error, Retry):
            asked = None if error.after is None else checked_when(error.after)
            backoff = error.backoff
        elif isinstance(error, AttemptEnded):
            backoff, stack = False, error.stack
    except Exception:
        asked = None  # a subclass with broken attributes is an error like any other
    failure = describe(error, stack=stack)
    if attempt >= max_attempts:
        return DeadLettered(EXHAUSTED, failure)
    after, warning = _cut(asked) if asked is not None else _policy_delay(policy, attempt, random)
    min_wait = policy.min_wait(attempt)
    if isinstance(after, float):
        after = max(after, min_wait)
    return Retried(after, failure, backoff, warning, min_wait)


def _reason(error: Snooze) -> str:
    """Return the reason of a snooze as one line; empty if it has none, or none with a text."""
    try:
        text = str(error.reason or "").strip()
        return one_line(f"Snooze: {text}") if text else ""
    except Exception:
        return ""


def _policy_delay(policy: RetryPolicy, attempt: int, random: Random) -> tuple[float, str]:
    try:
        return policy.delay(attempt, random=random), ""
    except BackoffFailed as error:
        cause = f" ({describe(error.__cause__).error_class})" if error.__cause__ else ""
        return WAIT_WITHOUT_POLICY, one_line(f"{error}{cause}; waiting {WAIT_WITHOUT_POLICY} s")


def _cut(after: float | datetime) -> tuple[float | datetime, str]:
    if isinstance(after, float) and after > MAX_WAIT:
        return MAX_WAIT, f"a wait of {after:g} s was cut to 366 days"
    return after, ""
