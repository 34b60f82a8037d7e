"""Retry policies: waits, numbers of attempts, and the part that a message stores."""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mq.exceptions import InvalidOption
from django_mq.policy.backoff import (
    MAX_INTERVALS,
    MAX_WAIT,
    BackoffFailed,
    BackoffStrategy,
    RetryPolicy,
    as_seconds,
    exponential,
    fixed,
    intervals,
)

attempts = st.integers(1, 10_000)
randoms = st.floats(0, 1, exclude_max=True)
waits = st.floats(0.001, MAX_WAIT)
exponentials = st.builds(
    lambda base, more, factor, jitter: exponential(
        base, factor, min(base + more, MAX_WAIT), jitter
    ),
    waits,
    waits,
    st.floats(1, 1e300),
    st.sampled_from(["equal", "full", "none"]),
)
schedules = st.one_of(
    exponentials,
    waits.map(fixed),
    st.lists(waits, min_size=1, max_size=MAX_INTERVALS).map(lambda each: intervals(*each)),
)


def half() -> float:
    return 0.5


def test_default_is_twenty_attempts_exponential_from_one_second_to_six_hours() -> None:
    """PMQ-67, CAR-24, NSQ-19: a finite number of attempts by default."""
    policy = RetryPolicy()
    assert policy.max_attempts == 20
    assert policy.backoff == exponential(base=1, factor=2, cap=timedelta(hours=6), jitter="equal")
    assert policy.delay(1, random=lambda: 0.0) == 0.5
    assert policy.delay(19, random=lambda: 0.0) == 6 * 3600 / 2


def test_never_is_a_single_attempt() -> None:
    """RMQ-15: a message that is not repeated."""
    assert RetryPolicy.never().max_attempts == 1


@pytest.mark.parametrize(
    ("backoff", "waits"),
    [
        (exponential(jitter="none"), [1, 2, 4, 8, 16]),
        (exponential(base=3, factor=3, cap=50, jitter="none"), [3, 9, 27, 50, 50]),
        (exponential(base=5, factor=1, jitter="none"), [5, 5, 5, 5, 5]),
        (exponential(base=timedelta(minutes=1), cap=90, jitter="none"), [60, 90, 90, 90, 90]),
        (exponential(base=4, jitter="equal"), [3, 6, 12, 24, 48]),
        (exponential(base=4, jitter="full"), [2, 4, 8, 16, 32]),
        (fixed(7), [7, 7, 7, 7, 7]),
        (fixed(timedelta(milliseconds=200)), [0.2, 0.2, 0.2, 0.2, 0.2]),
        (fixed(0), [0, 0, 0, 0, 0]),
        (intervals(15, timedelta(seconds=30), 60), [15, 30, 60, 60, 60]),
        (intervals(0, 9), [0, 9, 9, 9, 9]),
        (lambda attempt: attempt * 10, [10, 20, 30, 40, 50]),
        (lambda attempt: timedelta(minutes=attempt), [60, 120, 180, 240, 300]),
        (lambda attempt: Decimal("1.5"), [1.5] * 5),
        (lambda attempt: Fraction(attempt, 2), [0.5, 1, 1.5, 2, 2.5]),
        (lambda attempt: 5 * 2 ** (attempt - 1) - 5, [0, 5, 15, 35, 75]),  # PMQ-68
        (lambda attempt: 1e12, [MAX_WAIT] * 5),
    ],
)
def test_waits_of_the_first_five_attempts(
    backoff: BackoffStrategy | Callable[[int], float], waits: list[float]
) -> None:
    policy = RetryPolicy(backoff=backoff)
    assert [policy.delay(attempt, random=half) for attempt in range(1, 6)] == waits


@pytest.mark.parametrize(
    ("backoff", "waits"),
    [
        (fixed(0), [0, 0.1, 0.1, 0.1]),
        (intervals(0, 0, 9), [0, 0.1, 9, 9]),
        (exponential(base=0.01, jitter="none"), [0.01, 0.1, 0.1, 0.1]),
        (lambda attempt: 0, [0, 0.1, 0.1, 0.1]),
        (lambda attempt: 5 * 2 ** (attempt - 1) - 5, [0, 5, 15, 35]),  # PMQ-68
    ],
)
def test_only_the_first_retry_may_be_at_once(
    backoff: BackoffStrategy | Callable[[int], float], waits: list[float]
) -> None:
    policy = RetryPolicy(backoff=backoff)
    floored = policy.with_floor(0.1)
    assert [floored.delay(attempt, random=half) for attempt in range(1, 5)] == waits
    assert floored == policy


def test_a_floor_is_not_stored_and_has_a_bound() -> None:
    """A message carries its policy; the floor is a setting of the worker that runs it."""
    floored = RetryPolicy(backoff=fixed(0)).with_floor(1e12)
    assert floored.to_data() == {"max_attempts": 20, "kind": "fixed", "seconds": 0.0}
    assert floored.delay(2, random=half) == MAX_WAIT


def test_interval_list_of_a_message_has_one_wait_for_each_attempt() -> None:
    """RMQ-17: 15, 30, 60, 300, 86400 seconds."""
    policy = RetryPolicy(max_attempts=6, backoff=intervals(15, 30, 60, 300, 86400))
    waits = [policy.delay(attempt, random=half) for attempt in range(1, 7)]
    assert waits == [15, 30, 60, 300, 86400, 86400]


@given(exponentials, attempts, randoms)
def test_exponential_waits_within_its_jitter_and_never_beyond_its_cap(
    backoff: BackoffStrategy, attempt: int, number: float
) -> None:
    """S15: jitter, a cap, and a wait above zero; no number of attempts overflows."""
    ceiling = exponential(backoff.base, backoff.factor, backoff.cap, "none").delay(attempt, half)
    wait = RetryPolicy(backoff=backoff).delay(attempt, random=lambda: number)
    minimum = {"none": ceiling, "equal": ceiling / 2, "full": 0}[backoff.jitter]
    assert minimum <= wait <= ceiling <= backoff.cap
    assert wait > 0


@given(schedules, st.integers(1, 1000))
def test_data_comes_back_through_json_equal(backoff: BackoffStrategy, max_attempts: int) -> None:
    """RMQ-15, RMQ-16, RMQ-17: the policy travels with the message."""
    policy = RetryPolicy(max_attempts, backoff)
    assert RetryPolicy.from_data(json.loads(json.dumps(policy.to_data()))) == policy


def test_data_has_kind_and_numbers_only() -> None:
    assert RetryPolicy().to_data() == {
        "max_attempts": 20,
        "kind": "exponential",
        "base": 1.0,
        "factor": 2.0,
        "cap": 21600.0,
        "jitter": "equal",
    }


def test_callable_does_not_travel() -> None:
    with pytest.raises(InvalidOption, match=r"exponential\(\).*handler"):
        RetryPolicy(backoff=lambda attempt: 1).to_data()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "fixed",
        {},
        {"kind": "os.system", "seconds": 1},
        {"kind": "antigravity"},
        {"kind": ["fixed"], "seconds": 1},
        {"kind": "fixed"},
        {"kind": "fixed", "seconds": "1"},
        {"kind": "fixed", "seconds": -1},
        {"kind": "fixed", "seconds": True},
        {"kind": "fixed", "seconds": 1e300},
        {"kind": "fixed", "seconds": 10**400},
        {"kind": "fixed", "seconds": float("nan")},
        {"kind": "fixed", "seconds": 1, "call": "os.system"},
        {"kind": "fixed", "seconds": 1, "max_attempts": 0},
        {"kind": "fixed", "seconds": 1, "max_attempts": None},
        {"kind": "fixed", "seconds": 1, "max_attempts": 1.5},
        {"kind": "fixed", 1: 1},
        {"kind": "intervals", "seconds": []},
        {"kind": "intervals", "seconds": 5},
        {"kind": "intervals", "seconds": "15"},
        {"kind": "intervals", "seconds": {"15": 1}},
        {"kind": "intervals", "seconds": [1] * (MAX_INTERVALS + 1)},
        {"kind": "exponential", "base": 0},
        {"kind": "exponential", "factor": 0.5},
        {"kind": "exponential", "jitter": "some"},
        {"kind": "exponential", "jitter": ["full"]},
        {"kind": "exponential", "base": 10, "cap": 5},
    ],
)
def test_bad_data_raises_value_error_and_imports_nothing(data: object) -> None:
    """S01, S26: data picks a kind; nothing it names is imported or called."""
    loaded = set(sys.modules)
    with pytest.raises(ValueError):  # noqa: PT011  (the texts differ, the class is the promise)
        RetryPolicy.from_data(data)
    assert set(sys.modules) == loaded


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "fixed", "seconds": "x" * 10**6},
        {"kind": "fixed", "seconds": 1, "forged\nERROR all is lost": 1},
    ],
    ids=["long", "lines"],
)
def test_the_error_about_bad_data_is_one_short_line(data: object) -> None:
    """S13: other programs write rows, too, and a worker logs the error."""
    with pytest.raises(ValueError, match="not a stored retry policy") as caught:
        RetryPolicy.from_data(data)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RetryPolicy(max_attempts=0), "max_attempts must be 1 to"),
        (lambda: RetryPolicy(max_attempts=10**7), "max_attempts must be 1 to"),
        (lambda: RetryPolicy(max_attempts=True), "max_attempts must be 1 to"),
        (lambda: RetryPolicy(max_attempts=2.0), "max_attempts must be 1 to"),
        (lambda: RetryPolicy(backoff=5), "fixed"),
        (lambda: RetryPolicy(backoff=None), "exponential"),
        (lambda: RetryPolicy(backoff=exponential), "call it"),
        (lambda: RetryPolicy(backoff=intervals), "call it"),
        (lambda: exponential(base=0), r"fixed\(0\)"),
        (lambda: exponential(base=-1), "base must be seconds"),
        (lambda: exponential(base="1"), "base must be seconds"),
        (lambda: exponential(factor=0.9), "factor must be"),
        (lambda: exponential(factor=float("inf")), "factor must be"),
        (lambda: exponential(base=10, cap=9), "cap .* base"),
        (lambda: exponential(cap=timedelta(days=400)), "366 days"),
        (lambda: exponential(jitter="half"), '"equal", "full" or "none"'),
        (lambda: fixed(-1), "seconds must be"),
        (lambda: fixed(float("nan")), "seconds must be"),
        (lambda: fixed(timedelta(days=-1)), "seconds must be"),
        (lambda: fixed(True), "seconds must be"),
        (lambda: intervals(), "give 1 to"),
        (lambda: intervals(*range(MAX_INTERVALS + 1)), "give 1 to"),
        (lambda: intervals(1, -1), "an interval must be"),
        (lambda: intervals([15, 30]), "an interval must be"),
    ],
)
def test_bad_arguments_raise_with_a_hint(make: Callable[[], object], text: str) -> None:
    """PMQ-34, NSQ-32: a wrong type or bound is refused when the policy is made."""
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("value", [10**5000, "x" * 10_000], ids=["5,000 digits", "long"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda value: RetryPolicy(max_attempts=value), "max_attempts must be 1 to"),
        (lambda value: RetryPolicy(backoff=value), "backoff must be exponential"),
        (lambda value: exponential(base=value), "base must be seconds"),
        (lambda value: exponential(factor=value), "factor must be a number"),
        (lambda value: exponential(jitter=value), "jitter must be"),
        (fixed, "seconds must be seconds"),
        (intervals, "an interval must be"),
    ],
)
def test_a_bad_argument_is_named_in_a_short_text(
    make: Callable[[object], object], text: str, value: object
) -> None:
    """Python refuses to print an integer of more than 4,300 digits."""
    with pytest.raises(ValueError, match=text) as caught:
        make(value)
    assert len(str(caught.value)) < 300


def _raise(error: BaseException) -> float:
    raise error


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), SystemExit(3)])
def test_callable_that_raises_is_a_backoff_failure(error: BaseException) -> None:
    """PMQ-54."""
    with pytest.raises(BackoffFailed, match="raised") as caught:
        RetryPolicy(backoff=lambda attempt: _raise(error)).delay(1, random=half)
    assert caught.value.__cause__ is error


def test_keyboard_interrupt_in_a_callable_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        RetryPolicy(backoff=lambda attempt: _raise(KeyboardInterrupt())).delay(1, random=half)


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("not for you")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "5",
        -1,
        float("nan"),
        float("inf"),
        timedelta(seconds=-1),
        True,
        10**400,
        pytest.param(10**5000, id="digits"),
        Decimal("sNaN"),
        [1],
        1j,
        Hostile(),
    ],
)
def test_callable_that_returns_no_wait_is_a_backoff_failure(value: object) -> None:
    """PMQ-54."""
    policy = RetryPolicy(backoff=lambda attempt: value)
    with pytest.raises(BackoffFailed, match="must return seconds"):
        policy.delay(1, random=half)
    assert as_seconds(value) is None


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_count_from_one(attempt: int) -> None:
    with pytest.raises(ValueError, match="from 1"):
        RetryPolicy().delay(attempt, random=half)


def test_policies_are_frozen_and_compare_by_value() -> None:
    assert RetryPolicy(3, fixed(5)) == RetryPolicy(max_attempts=3, backoff=fixed(5.0))
    assert len({RetryPolicy(), RetryPolicy()}) == 1
    with pytest.raises(AttributeError):
        RetryPolicy().max_attempts = 5
