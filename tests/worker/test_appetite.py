"""How much to have in hand: begins small, follows how fast it is eaten. By a clock of its own."""

from __future__ import annotations

import pytest

from django_mq.worker.appetite import Appetite


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def eat(appetite: Appetite, clock: Clock, seconds: float) -> int:
    """Claim what there is room for, and have it last so long."""
    room = appetite.room(0)
    appetite.fed(room)
    clock.now += seconds
    return room


def test_begins_with_one_for_each_thread(clock: Clock) -> None:
    """PMQ-38."""
    appetite = Appetite(least=3, most=400, batch=100, clock=clock)
    assert appetite.room(0) == 3


def test_grows_while_it_is_eaten_fast_and_no_further_than_the_most(clock: Clock) -> None:
    """PMQ-38: what is in hand is bounded, whatever the batch size; with a batch of one by one."""
    alone = Appetite(least=1, most=1, batch=1, clock=clock)
    assert [eat(alone, clock, 0.01) for _ in range(5)] == [1] * 5
    assert alone.room(1) == 0
    appetite = Appetite(least=1, most=400, batch=100, clock=clock)
    rooms = [eat(appetite, clock, 0.2) for _ in range(12)]
    assert rooms[:4] == [1, 2, 4, 8]
    assert rooms[-1] == 400
    assert appetite.wanted == 400


def test_grows_twice_as_fast_while_that_is_still_eaten_fast(clock: Clock) -> None:
    appetite = Appetite(least=1, most=400, batch=100, clock=clock)
    assert [eat(appetite, clock, 0.06) for _ in range(6)] == [1, 4, 16, 64, 256, 400]


def test_shrinks_when_it_lasts_long_and_not_below_the_least(clock: Clock) -> None:
    appetite = Appetite(least=2, most=400, batch=100, clock=clock)
    for _ in range(12):
        eat(appetite, clock, 0.01)
    for _ in range(12):
        eat(appetite, clock, 5.0)
    assert appetite.wanted == 2


def test_stays_while_it_lasts_as_it_should(clock: Clock) -> None:
    appetite = Appetite(least=1, most=400, batch=100, clock=clock)
    for _ in range(5):
        eat(appetite, clock, 0.2)
    appetite.room(0)  # only now it learns how long the last lasted
    wanted = appetite.wanted
    assert 1 < wanted < 400
    for _ in range(5):
        eat(appetite, clock, 0.5)
    assert appetite.wanted == wanted


def test_a_claim_that_was_not_full_says_nothing(clock: Clock) -> None:
    appetite = Appetite(least=1, most=400, batch=100, clock=clock)
    for _ in range(6):
        eat(appetite, clock, 0.2)
    appetite.room(0)  # only now it learns how long the last lasted
    wanted = appetite.wanted
    assert 1 < wanted < 400
    for _ in range(5):
        appetite.room(0)
        appetite.fed(1)
        clock.now += 0.01
    assert appetite.wanted == wanted


def test_what_lasts_for_seconds_is_given_back(clock: Clock) -> None:
    """Fast messages taught it to hold hundreds; those that came now are slow."""
    appetite = Appetite(least=2, most=800, batch=100, clock=clock)
    while appetite.wanted < 800:
        eat(appetite, clock, 0.01)
    assert not appetite.glutted(800)
    clock.now += 1.9
    assert not appetite.glutted(790)
    clock.now += 0.2
    assert appetite.glutted(780)
    appetite.lose()
    assert (appetite.wanted, appetite.room(0)) == (2, 2)
    assert not appetite.glutted(2)


def test_what_is_eaten_by_half_is_no_glut(clock: Clock) -> None:
    appetite = Appetite(least=2, most=800, batch=100, clock=clock)
    while appetite.wanted < 800:
        eat(appetite, clock, 0.01)
    for _ in range(10):
        assert not appetite.glutted(800)
        clock.now += 1.5
        assert not appetite.glutted(300)  # it claims again now
    clock.now += 100.0
    assert not appetite.glutted(300)


def test_claims_are_not_made_in_crumbs(clock: Clock) -> None:
    """Each claim costs a round trip, and a commit: not for less than half of what is wanted."""
    appetite = Appetite(least=1, most=400, batch=100, clock=clock)
    while appetite.wanted < 400:
        eat(appetite, clock, 0.01)
    assert appetite.room(400) == 0
    assert appetite.room(201) == 0
    assert appetite.room(200) == 200
    assert appetite.least == 201


@pytest.mark.parametrize(("least", "most", "batch"), [(1, 4, 1), (8, 4, 1), (3, 400, 100)])
def test_an_empty_hand_always_has_room(clock: Clock, least: int, most: int, batch: int) -> None:
    """Else nobody would ever claim again."""
    appetite = Appetite(least=least, most=most, batch=batch, clock=clock)
    for seconds in (0.01, 0.01, 9, 9, 0.01, 0.5, 0.01, 9, 9, 9):
        assert appetite.room(0) >= 1
        assert appetite.least >= 1
        eat(appetite, clock, seconds)


@pytest.mark.parametrize("waiting", [0, 1, 3, 4, 5, 399, 400, 401, 10_000])
def test_room_is_never_below_zero(clock: Clock, waiting: int) -> None:
    """PMQ-39: with more in hand than is wanted there is no room, and nothing is owed."""
    appetite = Appetite(least=4, most=400, batch=100, clock=clock)
    for _ in range(12):
        eat(appetite, clock, 0.01)
    appetite.lose()
    room = appetite.room(waiting)
    assert 0 <= room <= max(0, 4 - waiting)
    assert appetite.room(0) == 4
