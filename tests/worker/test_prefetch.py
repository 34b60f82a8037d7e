"""The number of messages to hold: small at first, then as many as run quickly. By a test clock."""

from __future__ import annotations

import pytest

from django_mq.worker.prefetch import Prefetch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def eat(prefetch: Prefetch, clock: Clock, seconds: float) -> int:
    """Claim as many as there is room for; they take `seconds`."""
    room = prefetch.room(0)
    prefetch.claimed(room)
    clock.now += seconds
    return room


def test_begins_with_one_for_each_thread(clock: Clock) -> None:
    """PMQ-38."""
    prefetch = Prefetch(minimum=3, maximum=400, batch=100, clock=clock)
    assert prefetch.room(0) == 3


def test_grows_while_it_is_eaten_fast_and_no_further_than_the_most(clock: Clock) -> None:
    """PMQ-38: the number of held messages is bounded, whatever the batch size."""
    alone = Prefetch(minimum=1, maximum=1, batch=1, clock=clock)
    assert [eat(alone, clock, 0.01) for _ in range(5)] == [1] * 5
    assert alone.room(1) == 0
    prefetch = Prefetch(minimum=1, maximum=400, batch=100, clock=clock)
    rooms = [eat(prefetch, clock, 0.2) for _ in range(12)]
    assert rooms[:4] == [1, 2, 4, 8]
    assert rooms[-1] == 400
    assert prefetch.target == 400


def test_grows_twice_as_fast_while_that_is_still_eaten_fast(clock: Clock) -> None:
    prefetch = Prefetch(minimum=1, maximum=400, batch=100, clock=clock)
    assert [eat(prefetch, clock, 0.06) for _ in range(6)] == [1, 4, 16, 64, 256, 400]


def test_shrinks_when_it_lasts_long_and_not_below_the_least(clock: Clock) -> None:
    prefetch = Prefetch(minimum=2, maximum=400, batch=100, clock=clock)
    for _ in range(12):
        eat(prefetch, clock, 0.01)
    for _ in range(12):
        eat(prefetch, clock, 5.0)
    assert prefetch.target == 2


def test_stays_while_it_lasts_as_it_should(clock: Clock) -> None:
    prefetch = Prefetch(minimum=1, maximum=400, batch=100, clock=clock)
    for _ in range(5):
        eat(prefetch, clock, 0.2)
    prefetch.room(0)  # only now it learns how long the last ones took
    wanted = prefetch.target
    assert 1 < wanted < 400
    for _ in range(5):
        eat(prefetch, clock, 0.5)
    assert prefetch.target == wanted


def test_partial_claim_does_not_change_the_target(clock: Clock) -> None:
    prefetch = Prefetch(minimum=1, maximum=400, batch=100, clock=clock)
    for _ in range(6):
        eat(prefetch, clock, 0.2)
    prefetch.room(0)  # only now it learns how long the last ones took
    wanted = prefetch.target
    assert 1 < wanted < 400
    for _ in range(5):
        prefetch.room(0)
        prefetch.claimed(1)
        clock.now += 0.01
    assert prefetch.target == wanted


def test_full_batch_is_measured(clock: Clock) -> None:
    """A claim takes a batch at most, however much room there is."""
    prefetch = Prefetch(minimum=64, maximum=400, batch=10, clock=clock)
    assert prefetch.room(0) == 64
    prefetch.claimed(10)
    clock.now += 0.2
    assert prefetch.room(0) == 128


def test_prefetch_that_lasts_for_seconds_is_too_much(clock: Clock) -> None:
    """Fast messages taught it to hold hundreds; the new ones are slow."""
    prefetch = Prefetch(minimum=2, maximum=800, batch=100, clock=clock)
    while prefetch.target < 800:
        eat(prefetch, clock, 0.01)
    assert not prefetch.holds_too_much(800, 0)
    clock.now += 1.9
    assert not prefetch.holds_too_much(790, 10)
    clock.now += 0.2
    assert prefetch.holds_too_much(780, 20)
    prefetch.reset()
    assert (prefetch.target, prefetch.room(0)) == (2, 2)
    assert not prefetch.holds_too_much(2, 20)


def test_few_slow_messages_after_many_fast_ones_are_too_much(clock: Clock) -> None:
    """Less than half of the target, and now and then a claim adds one."""
    prefetch = Prefetch(minimum=2, maximum=800, batch=100, clock=clock)
    while prefetch.target < 800:
        eat(prefetch, clock, 0.01)
    too_much = []
    for taken in range(0, 12, 4):
        too_much.append(prefetch.holds_too_much(290, taken))
        prefetch.claimed(1)
        clock.now += 1.1
    assert too_much == [False, False, True]


def test_half_consumed_prefetch_is_not_too_much(clock: Clock) -> None:
    prefetch = Prefetch(minimum=2, maximum=800, batch=100, clock=clock)
    while prefetch.target < 800:
        eat(prefetch, clock, 0.01)
    for taken in range(0, 5000, 500):
        assert not prefetch.holds_too_much(800, taken)
        clock.now += 1.5
        assert not prefetch.holds_too_much(300, taken + 500)  # now it claims again


def test_one_that_starts_within_two_seconds_is_no_glut(clock: Clock) -> None:
    prefetch = Prefetch(minimum=1, maximum=800, batch=100, clock=clock)
    for taken in range(5):
        assert not prefetch.holds_too_much(1, taken)
        clock.now += 1.9
    clock.now += 2.1
    assert prefetch.holds_too_much(1, 4)


def test_claims_are_not_made_in_crumbs(clock: Clock) -> None:
    """A claim costs a round trip and a commit: none is made for less than half of the target."""
    prefetch = Prefetch(minimum=1, maximum=400, batch=100, clock=clock)
    while prefetch.target < 400:
        eat(prefetch, clock, 0.01)
    assert prefetch.room(400) == 0
    assert prefetch.room(201) == 0
    assert prefetch.room(200) == 200
    assert prefetch.claim_below == 201


@pytest.mark.parametrize(("minimum", "maximum", "batch"), [(1, 4, 1), (8, 4, 1), (3, 400, 100)])
def test_an_empty_hand_always_has_room(
    clock: Clock, minimum: int, maximum: int, batch: int
) -> None:
    """Without that it would never claim again."""
    prefetch = Prefetch(minimum=minimum, maximum=maximum, batch=batch, clock=clock)
    for seconds in (0.01, 0.01, 9, 9, 0.01, 0.5, 0.01, 9, 9, 9):
        assert prefetch.room(0) >= minimum
        assert prefetch.claim_below >= 1
        eat(prefetch, clock, seconds)


@pytest.mark.parametrize("waiting", [0, 1, 3, 4, 5, 399, 400, 401, 10_000])
def test_room_is_never_below_zero(clock: Clock, waiting: int) -> None:
    """PMQ-39: with more messages than the target there is no room; it is never negative."""
    prefetch = Prefetch(minimum=4, maximum=400, batch=100, clock=clock)
    for _ in range(12):
        eat(prefetch, clock, 0.01)
    prefetch.reset()
    room = prefetch.room(waiting)
    assert 0 <= room <= max(0, 4 - waiting)
    assert prefetch.room(0) == 4
