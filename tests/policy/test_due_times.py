"""The times that a late schedule broadcasts, and its next time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mq.policy.due_times import MAX_MISSED, IntervalTimes, due, last_times

SIX = datetime(2026, 3, 1, 6, tzinfo=UTC)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
HOURLY = IntervalTimes(HOUR, start=SIX)


def decide(now, catch_up="once", next_at=SIX, times=HOURLY, late=MINUTE):
    return due(times, next_at=next_at, now=now, catch_up=catch_up, late=late)


@pytest.mark.parametrize("catch_up", ["once", "all", "none"])
def test_a_time_that_comes_is_broadcast_at_once_and_the_next_follows(catch_up):
    assert decide(SIX - SECOND, catch_up) == ((), SIX)
    assert decide(SIX, catch_up) == ((SIX,), SIX + HOUR)
    assert decide(SIX + SECOND, catch_up) == ((SIX,), SIX + HOUR)


@pytest.mark.parametrize(
    ("catch_up", "hours"), [("once", [3]), ("all", [0, 1, 2, 3]), ("none", [])]
)
def test_missed_times(catch_up, hours):
    """No worker ran from 6 until 9:30."""
    found = decide(SIX + 3.5 * HOUR, catch_up)
    assert found == (tuple(SIX + hour * HOUR for hour in hours), SIX + 4 * HOUR)


def test_none_broadcasts_the_latest_time_unless_it_was_missed():
    assert decide(SIX + 3 * HOUR + MINUTE, "none").times == (SIX + 3 * HOUR,)
    assert decide(SIX + 3 * HOUR + MINUTE + SECOND, "none").times == ()


@pytest.mark.parametrize("every", [1, 10, 60])
@pytest.mark.parametrize("stood", [95, 18_000, 18_000.05])
def test_none_broadcasts_nothing_after_a_standstill_if_the_next_time_is_near(every, stood):
    """The latest time of such a schedule is never a minute late, however long nobody worked."""
    often = IntervalTimes(every * SECOND, start=SIX)
    found = decide(SIX + stood * SECOND, "none", times=often)
    assert found.times == ()
    assert SIX + stood * SECOND < found.next_at <= SIX + (stood + every) * SECOND


@pytest.mark.parametrize("every", [1, 5, 10, 60, 3600])
@pytest.mark.parametrize("lag", [0.3, 4, 59, 60])
def test_none_broadcasts_the_latest_time_of_a_schedule_whose_worker_was_busy(every, lag):
    found = decide(SIX + lag * SECOND, "none", times=IntervalTimes(every * SECOND, start=SIX))
    assert found.times == (SIX + lag // every * every * SECOND,)


@pytest.mark.parametrize(("lag", "sent"), [(0, True), (29, True), (30, False), (89, False)])
def test_none_after_a_standstill_leaves_a_time_to_the_next_one_within_a_minute(lag, sent):
    ninety = IntervalTimes(90 * SECOND, start=SIX)
    latest = SIX + 40 * 90 * SECOND
    found = decide(latest + lag * SECOND, "none", times=ninety)
    assert found == ((latest,) if sent else (), latest + 90 * SECOND)


def test_none_after_a_standstill_counts_to_the_next_time_of_this_day():
    """Two times in a row, then none until the next day: the second is on time."""

    class Twice:
        def after(self, at):
            return (each for each in (SIX, SIX + MINUTE, SIX + 24 * HOUR) if each > at)

    assert decide(SIX + 65 * SECOND, "none", times=Twice()).times == (SIX + MINUTE,)


def test_all_is_the_newest_thousand():
    seconds = IntervalTimes(SECOND, start=SIX)
    now = SIX + timedelta(days=40)
    found = decide(now, "all", times=seconds)
    assert len(found.times) == MAX_MISSED
    assert found.times[0] == now - (MAX_MISSED - 1) * SECOND
    assert found.times[-1] == now


class Counted:
    """The times of another schedule, and the number of times requested."""

    def __init__(self, times):
        self.times, self.asked = times, 0

    def after(self, at):
        for each in self.times.after(at):
            self.asked += 1
            yield each


@pytest.mark.parametrize(("catch_up", "maximum"), [("once", 10), ("none", 10), ("all", 5000)])
def test_a_long_standstill_costs_no_more_than_a_short_one(catch_up, maximum):
    times = Counted(IntervalTimes(MINUTE, start=SIX))
    decide(SIX + timedelta(days=3650), catch_up, times=times)
    assert times.asked <= maximum


def test_time_outside_the_schedule_is_broadcast_too():
    """Somebody moved it by SQL: the row decides when it is due."""
    odd = SIX - 7 * MINUTE
    assert decide(odd + SECOND, next_at=odd) == ((odd,), SIX)


class Ended:
    def after(self, at):
        return (each for each in (SIX,) if each > at)


def test_a_schedule_may_have_no_next_time():
    assert decide(SIX + MINUTE, times=Ended()) == ((SIX,), None)


@given(
    every=st.integers(1, 90_000),
    missed=st.integers(0, 10_000_000),
    maximum=st.integers(1, 50),
)
def test_the_last_times_are_those_of_a_walk_from_the_first(every, missed, maximum):
    step, until = timedelta(seconds=every), SIX + timedelta(seconds=missed)
    number = missed // every
    walked = [SIX + step * n for n in range(max(0, number - maximum + 1), number + 1)]
    found = last_times(IntervalTimes(step, start=SIX), first=SIX, until=until, maximum=maximum)
    assert found == walked


def test_times_end_where_python_has_no_more_dates():
    centuries = IntervalTimes(timedelta(days=36525), start=SIX)
    assert len(list(centuries.after(SIX))) == 79


def test_an_interval_counts_from_its_start_in_both_directions():
    assert next(HOURLY.after(SIX - 2.5 * HOUR)) == SIX - 2 * HOUR
    assert next(HOURLY.after(SIX)) == SIX + HOUR
