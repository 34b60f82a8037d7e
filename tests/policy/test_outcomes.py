"""The end of a handler, and the outcome of its delivery."""

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mq.exceptions import LeaseLost, Reject, Retry, Snooze
from django_mq.policy.backoff import MAX_WAIT, RetryPolicy, fixed, intervals
from django_mq.policy.outcomes import (
    AttemptEnded,
    DeadLettered,
    Outcome,
    Retried,
    Snoozed,
    TimedOut,
    WorkerLost,
    decide,
)

MOMENT = datetime(2030, 1, 1, tzinfo=UTC)


def decided(error: BaseException, **changes: Any) -> Outcome:
    given = {"attempt": 1, "max_attempts": 3, "policy": RetryPolicy(backoff=fixed(5))}
    return decide(error, random=lambda: 0.5, **(given | changes))


@pytest.mark.parametrize(
    ("error", "after", "backoff"),
    [
        (ValueError("x"), 5.0, True),
        (TimeoutError("of a socket"), 5.0, True),
        (SystemExit(1), 5.0, True),
        (KeyboardInterrupt(), 5.0, True),
        (LeaseLost("x"), 5.0, True),
        (AttemptEnded("x"), 5.0, False),
        (TimedOut("ran longer than 300 s"), 5.0, False),
        (WorkerLost("x"), 5.0, False),
        (Retry(), 5.0, False),
        (Retry(backoff=True), 5.0, True),
        (Retry(30), 30.0, False),
        (Retry(0), 0.0, False),
        (Retry(Decimal("1.5")), 1.5, False),
        (Retry(timedelta(minutes=1), backoff=True), 60.0, True),
        (Retry(MOMENT), MOMENT, False),
    ],
)
def test_failed_attempt_is_retried(
    error: BaseException, after: float | datetime, backoff: bool
) -> None:
    """CAR-25, CAR-26, NSQ-12, NSQ-13, NSQ-16, NSQ-20; PMQ-46: all forms of failure are equal."""
    outcome = decided(error)
    assert isinstance(outcome, Retried)
    assert (outcome.after, outcome.backoff, outcome.warning) == (after, backoff, "")
    assert outcome.failure.error_class.endswith(type(error).__name__)


@pytest.mark.parametrize(
    "error", [ValueError("x"), Retry(), Retry(30, backoff=True), TimedOut("x"), WorkerLost("x")]
)
@pytest.mark.parametrize(("attempt", "max_attempts"), [(1, 1), (3, 3), (7, 3)])
def test_last_failed_attempt_is_a_dead_letter(
    error: Exception, attempt: int, max_attempts: int
) -> None:
    """RMQ-16: a limit and a count; the message's own count decides."""
    outcome = decided(error, attempt=attempt, max_attempts=max_attempts)
    assert isinstance(outcome, DeadLettered)
    assert outcome.reason == "exhausted"
    assert outcome.failure.error_class.endswith(type(error).__name__)


def test_message_decides_how_often_and_policy_how_long() -> None:
    """A requeued dead letter has more attempts than its policy says."""
    outcome = decided(ValueError("x"), attempt=20, max_attempts=21, policy=RetryPolicy.never())
    assert isinstance(outcome, Retried)


def test_policy_is_asked_with_the_attempt() -> None:
    """RMQ-17; PMQ-45: the first failed attempt is 1."""
    policy = RetryPolicy(backoff=intervals(15, 30, 60))
    waits = [
        decided(ValueError("x"), attempt=attempt, max_attempts=9, policy=policy)
        for attempt in (1, 2, 3, 4)
    ]
    assert [each.after for each in waits if isinstance(each, Retried)] == [15, 30, 60, 60]


@pytest.mark.parametrize("attempt", [1, 3])
def test_reject_is_dead_at_once(attempt: int) -> None:
    """CAR-25: the way to say "error, do not retry"."""
    outcome = decided(Reject("no such\ncustomer\0"), attempt=attempt)
    assert isinstance(outcome, DeadLettered)
    assert outcome.reason == "no such customer\ufffd"
    assert outcome.failure.error_class == "django_mq.exceptions.Reject"


@pytest.mark.parametrize(
    "raised",
    [
        Retry(),
        Retry(timedelta(seconds=5), backoff=True),
        Snooze(MOMENT),
        Snooze(5, backoff=True),
        Snooze(5, reason="the bank is closed"),
        Reject("no such order"),
    ],
    ids=str,
)
def test_exceptions_of_handlers_survive_pickling(raised: Exception) -> None:
    """A handler may have a pool of processes do its work, and raise there."""
    arrived = pickle.loads(pickle.dumps(raised))  # noqa: S301
    assert (type(arrived), str(arrived)) == (type(raised), str(raised))
    assert vars(arrived) == vars(raised)


def test_backoff_may_be_given_by_position() -> None:
    assert (Retry(None, True).after, Retry(None, True).backoff) == (None, True)
    assert (Retry(5, True).after, Retry(5, True).backoff) == (5.0, True)
    assert (Snooze(5, True).after, Snooze(5, True).backoff) == (5.0, True)


def test_reject_without_a_reason_has_one() -> None:
    for error in (Reject(), Reject(""), Reject(" \n")):
        outcome = decided(error)
        assert isinstance(outcome, DeadLettered)
        assert outcome.reason == "rejected"


@pytest.mark.parametrize("attempt", [1, 3, 9])
def test_snooze_uses_no_attempt(attempt: int) -> None:
    assert decided(Snooze(60), attempt=attempt) == Snoozed(60.0)
    assert decided(Snooze(MOMENT), attempt=attempt) == Snoozed(MOMENT)
    assert decided(Snooze(60, backoff=True), attempt=attempt) == Snoozed(60.0, backoff=True)
    assert decided(Snooze(60, reason="no\nroute\0"), attempt=attempt) == Snoozed(
        60.0, reason="Snooze: no route\ufffd"
    )


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


class Closed(Snooze):
    """A project's own class, with a reason that `Snooze` did not set."""

    reason = property(lambda self: self.found)  # type: ignore[assignment]

    def __init__(self, found: Any) -> None:
        self.found = found
        super().__init__(60)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Snooze(60, reason=" \n"), ""),
        (Snooze(60, reason=None), ""),  # type: ignore[arg-type]
        (Closed("the bank is closed"), "Snooze: the bank is closed"),
        (Closed(503), "Snooze: 503"),
        (Closed(None), ""),
        (Closed(Unprintable()), ""),
    ],
)
def test_a_snooze_is_one_whatever_its_reason(error: Snooze, reason: str) -> None:
    assert decided(error) == Snoozed(60.0, reason=reason)


@pytest.mark.parametrize("error", [ValueError("x"), Retry(0), TimedOut("x"), WorkerLost("x")])
def test_from_the_second_retry_on_no_wait_is_below_the_floor(error: Exception) -> None:
    """PMQ-68: the first retry may come at once, whatever requests the wait."""
    policy = RetryPolicy(backoff=fixed(0)).with_floor(0.1)
    waits = [decided(error, attempt=n, max_attempts=9, policy=policy) for n in (1, 2, 8)]
    assert [each.after for each in waits if isinstance(each, Retried)] == [0.0, 0.1, 0.1]


def test_a_moment_is_left_to_the_clock_of_the_database_with_the_floor() -> None:
    policy = RetryPolicy().with_floor(0.1)
    first, second = (decided(Retry(MOMENT), attempt=n, policy=policy) for n in (1, 2))
    assert isinstance(first, Retried)
    assert isinstance(second, Retried)
    assert (first.after, first.min_wait) == (MOMENT, 0.0)
    assert (second.after, second.min_wait) == (MOMENT, 0.1)


def test_wait_beyond_the_maximum_is_cut_with_a_warning() -> None:
    """NSQ-18."""
    retried, snoozed = decided(Retry(1e300)), decided(Snooze(timedelta(days=1000)))
    assert isinstance(retried, Retried)
    assert isinstance(snoozed, Snoozed)
    for outcome in (retried, snoozed):
        assert outcome.after == MAX_WAIT
        assert "was cut to" in outcome.warning


def test_policy_that_raises_counts_as_one_second_and_is_reported() -> None:
    """PMQ-54."""

    def broken(attempt: int) -> float:
        raise LookupError("no\nsuch wait")

    outcome = decided(ValueError("the failure"), policy=RetryPolicy(backoff=broken))
    assert isinstance(outcome, Retried)
    assert outcome.after == 1.0
    assert outcome.failure.text == "the failure"
    assert outcome.warning == "the backoff callable raised (LookupError); waiting 1.0 s"


def test_policy_that_returns_nonsense_counts_as_one_second_and_is_reported() -> None:
    """PMQ-54."""
    outcome = decided(Retry(), policy=RetryPolicy(backoff=lambda attempt: -3))
    assert isinstance(outcome, Retried)
    assert outcome.after == 1.0
    assert "returned -3" in outcome.warning


def test_policy_is_not_asked_after_an_explicit_wait_or_the_last_attempt() -> None:
    def broken(attempt: int) -> float:
        raise AssertionError("asked")

    policy = RetryPolicy(backoff=broken)
    assert decided(Retry(3), policy=policy).warning == ""
    assert isinstance(decided(ValueError("x"), policy=policy, attempt=3), DeadLettered)


class ForgetfulRetry(Retry):
    def __init__(self) -> None:
        pass


class ForgetfulSnooze(Snooze):
    def __init__(self) -> None:
        pass


class ForgetfulReject(Reject):
    def __init__(self) -> None:
        pass


class Lies(Exception):
    @property
    def __class__(self) -> type:
        raise RuntimeError


def spoiled(error: Retry | Snooze, after: object) -> Retry | Snooze:
    error.after = after
    return error


@pytest.mark.parametrize(
    "make",
    [
        ForgetfulRetry,
        ForgetfulSnooze,
        ForgetfulReject,
        lambda: spoiled(Retry(), "soon"),
        lambda: spoiled(Snooze(1), float("nan")),
        lambda: spoiled(Snooze(1), None),
        Lies,
    ],
)
def test_spoiled_exception_is_an_error_like_any_other(make: Callable[[], Exception]) -> None:
    outcome = decided(make())
    assert isinstance(outcome, Retried)
    assert (outcome.after, outcome.backoff) == (5.0, True)


errors = st.sampled_from([ValueError("x"), TimedOut(), Reject(), Snooze(1), Retry(), Retry(2)])


@given(errors, st.integers(1, 30), st.integers(1, 30), st.floats(0, 1, exclude_max=True))
def test_no_failure_outlives_its_attempts(
    error: Exception, attempt: int, max_attempts: int, number: float
) -> None:
    """S15: bounded retries; only a snooze is no failure."""
    outcome = decide(
        error,
        attempt=attempt,
        max_attempts=max_attempts,
        policy=RetryPolicy(),
        random=lambda: number,
    )
    if isinstance(outcome, Retried):
        assert attempt < max_attempts
        assert 0 < outcome.after <= MAX_WAIT
    else:
        assert isinstance(outcome, DeadLettered) or isinstance(error, Snooze)
