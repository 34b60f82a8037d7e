"""The ends that move a queue's level, and the wait at each level."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.exceptions import Reject, Retry, Snooze
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.outcomes import TimedOut, WorkerLost, decide
from django_mq.policy.queue_backoff import Step, jittered_waits, step_of, top_level, wait

DEFAULTS = {"multiplier": 1.0, "maximum": 120.0}


class Spoiled(Retry):
    def __init__(self) -> None:
        Exception.__init__(self)


def step(error: BaseException, attempt: int = 1) -> Step:
    """Return the step of a delivery whose handler raised `error`."""
    outcome = decide(
        error, attempt=attempt, max_attempts=3, policy=RetryPolicy(), random=lambda: 0.5
    )
    return step_of(outcome, error)


@pytest.mark.parametrize("attempt", [1, 3])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(Retry(), Step.STAY, id="NSQ-12"),
        pytest.param(Retry(60), Step.STAY, id="NSQ-12-delay"),
        pytest.param(Retry(60, backoff=True), Step.UP, id="NSQ-13"),
        pytest.param(Retry(backoff=True), Step.UP, id="NSQ-13-policy"),
        pytest.param(Reject("no such user"), Step.DOWN, id="NSQ-14"),
        pytest.param(KeyError("host"), Step.UP, id="NSQ-16"),
        pytest.param(SystemExit(), Step.UP, id="NSQ-16-exit"),
        pytest.param(Snooze(5), Step.STAY, id="snooze"),
        pytest.param(Snooze(5, backoff=True), Step.UP, id="snooze-backoff"),
        pytest.param(TimedOut("slow"), Step.STAY, id="NSQ-20"),
        pytest.param(WorkerLost("killed"), Step.STAY, id="lost"),
        pytest.param(Spoiled(), Step.UP, id="a-retry-that-is-broken"),
    ],
)
def test_end_of_a_handler_moves_the_level(
    error: BaseException, expected: Step, attempt: int
) -> None:
    """NSQ-2: the same on the last attempt, after which the message is dead."""
    assert step(error, attempt) is expected


def test_unstarted_delivery_moves_nothing() -> None:
    assert step_of(None, None) is Step.STAY


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        (DEFAULTS, [2, 4, 8, 16, 32, 64, 120]),
        ({"multiplier": 0.5, "maximum": 3.0}, [1, 2, 3]),
        ({"multiplier": 1.0, "maximum": 8.0}, [2, 4, 8]),
        ({"multiplier": 0.2, "maximum": 0.2}, [0.2]),
        ({"multiplier": 900.0, "maximum": 120.0}, [120]),
        ({"multiplier": 1.0, "maximum": 0.0}, []),
    ],
)
def test_waits_double_up_to_their_maximum_where_the_level_stops(
    given: dict[str, float], waits: list[float]
) -> None:
    """NSQ-3, NSQ-6: with a maximum of zero there are no levels."""
    assert top_level(**given) == len(waits)
    assert [wait(level, **given) for level in range(1, len(waits) + 1)] == waits
    assert jittered_waits(**given, jitter=0.0, random=lambda: 0.9) == waits


def test_the_smallest_multiplier_that_a_setting_takes() -> None:
    """Workers of all queues ended as they started."""
    waits = jittered_waits(multiplier=5e-324, maximum=120.0, jitter=0.0, random=lambda: 0.5)
    assert waits[0] == 1e-323
    assert waits[-2] < waits[-1] == 120.0


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 0.9), (0.5, 1.0), (0.999999, 1.1)])
def test_waits_are_jittered_by_a_share(drawn: float, share: float) -> None:
    """NSQ-6 as changed: with jitter, even for the longest wait."""
    found = jittered_waits(**DEFAULTS, jitter=0.1, random=lambda: drawn)
    assert found[0] == pytest.approx(2 * share, rel=1e-5)
    assert found[-1] == pytest.approx(120 * share, rel=1e-5)


def test_a_message_by_itself_waits_longer_each_time_within_its_cap() -> None:
    """NSQ-17 with design.md's numbers: doubling with jitter, capped, independent of the queue."""
    policy = RetryPolicy()
    waits: list[Any] = [policy.delay(attempt, random=lambda: 0.5) for attempt in range(1, 20)]
    assert waits == sorted(waits)
    assert len({policy.delay(3, random=lambda n=n: n / 10) for n in range(10)}) == 10  # type: ignore[misc]
    assert policy.delay(19, random=lambda: 0.999) <= 6 * 3600
