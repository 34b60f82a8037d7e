"""Figures by minute: absolute counts, on the database's clock, each message once."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import handler
from django_mq.executor import minutes, worker_totals
from django_mq.executor.ended import Settled
from django_mq.executor.worker_totals import WorkerTotals
from django_mq.policy.error_text import Failure
from django_mq.policy.outcomes import DeadLettered, Retried, Snoozed
from django_mq.store.figures import ArrivalCount, MinuteRow
from tests.executor.test_worker_totals import NOW, ended

#: The database's clock at the start of each test: half past a minute.
START = NOW.timestamp() + 30
FIRST = int(NOW.timestamp())
FAILURE = Failure("ValueError", "no")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    for name in ("h", "i"):
        handler(name, name=name)(lambda delivery: None)
    clock = Clock()
    monkeypatch.setattr(minutes, "lease_clock", clock)
    return clock


@pytest.fixture
def these(clock: Clock) -> WorkerTotals:
    these = WorkerTotals()
    these.minutes.set_clock(START, clock())
    return these


def take(these: WorkerTotals) -> tuple[list[MinuteRow], list[ArrivalCount]]:
    found = these.minutes.take_unwritten()
    these.minutes.written()
    return found


def test_rows_hold_absolute_counts_of_a_minute(these: WorkerTotals, clock: Clock) -> None:
    these.add([ended(seconds=0.25), ended(seconds=0.25), ended(name="i")])
    rows, _ = take(these)
    assert [(row.minute, row.queue, row.handler, row.acked) for row in rows] == [
        (FIRST, "mail", "h", 2),
        (FIRST, "mail", "i", 1),
    ]
    assert sum(rows[0].ran.values()) == sum(rows[0].waited.values()) == 2
    these.add([ended()])
    [row], _ = take(these)
    assert (row.minute, row.handler, row.acked, sum(row.ran.values())) == (FIRST, "h", 3, 3)
    assert take(these) == ([], [])
    clock.seconds += 30
    these.add([ended()])
    [row], _ = take(these)
    assert (row.minute, row.acked) == (FIRST + 60, 1)
    assert these.read()["h"].acked == 4


def test_unstored_counts_are_taken_again(these: WorkerTotals, clock: Clock) -> None:
    """Together with the counts since then, even after the end of its minute."""
    these.add([ended()])
    assert len(these.minutes.take_unwritten()[0]) == 1
    clock.seconds += 60
    these.add([ended()])
    these.minutes.not_written()
    rows, arrived = take(these)
    assert [(row.minute, row.acked) for row in rows] == [(FIRST, 1), (FIRST + 60, 1)]
    assert sum(each.messages for each in arrived) == 2
    assert these.read()["h"].acked == 2


@pytest.mark.parametrize("seconds", [60, minutes.ARRIVAL_WINDOW + 60])
def test_counts_added_during_a_store_are_stored_next(
    these: WorkerTotals, clock: Clock, seconds: int
) -> None:
    """Even if their minute can no longer change when the store ends."""
    these.add([ended()])
    these.minutes.take_unwritten()
    these.add([ended()])
    clock.seconds += seconds
    these.minutes.written()
    [row], [arrived] = take(these)
    assert (row.minute, row.acked) == (FIRST, 2)
    assert (arrived.minute, arrived.messages) == (FIRST - 60, 2)
    assert take(these) == ([], [])
    assert these.read()["h"].acked == 2


def test_counts_wait_until_the_clock_is_known(clock: Clock) -> None:
    these = WorkerTotals()
    these.add([ended(age=60)])
    assert these.minutes.take_unwritten() == ([], [])
    these.minutes.set_clock(START, clock())
    these.add([ended()])
    [row], arrived = take(these)
    assert (row.minute, row.acked) == (FIRST, 2)
    assert {each.minute: each.messages for each in arrived} == {FIRST: 1, FIRST - 60: 1}


def test_a_clock_that_steps_back_overwrites_nothing(these: WorkerTotals, clock: Clock) -> None:
    these.add([ended()])
    take(these)
    these.minutes.set_clock(START - 600, clock())
    these.add([ended()])
    [row], _ = take(these)
    assert (row.minute, row.acked) == (FIRST, 2)


def test_messages_arrive_when_they_were_created(these: WorkerTotals, clock: Clock) -> None:
    """Absolute counts again: a message from an earlier minute adds to that minute's count."""
    these.add([ended(age=20), ended(age=70), ended(age=70)])
    _, arrived = take(these)
    assert {each.minute: each.messages for each in arrived} == {FIRST - 60: 1, FIRST - 120: 2}
    clock.seconds += 600
    these.add([ended(age=70), ended(age=minutes.ARRIVAL_WINDOW + 60)])
    _, arrived = take(these)
    assert {each.minute: each.messages for each in arrived} == {FIRST - 120: 3, FIRST + 600: 1}
    clock.seconds += minutes.ARRIVAL_WINDOW
    take(these)
    these.add([ended(age=70)])  # too late for its minute, whose count is forgotten
    _, [last] = take(these)
    assert (last.minute, last.messages) == (FIRST + 600 + minutes.ARRIVAL_WINDOW, 1)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 1),
        ({"settled": Settled.FAILED, "outcome": Retried(1.0, FAILURE, False)}, 1),
        ({"attempt": 2}, 0),
        ({"settled": Settled.SNOOZED, "outcome": Snoozed(1.0)}, 0),
        ({"settled": Settled.HELD}, 0),
        ({"settled": Settled.DEAD_UNSTARTED, "seconds": 0.0}, 1),
        ({"settled": Settled.DEAD_UNSTARTED, "seconds": 0.0, "attempt": 0, "claimed_by": ""}, 1),
        ({"settled": Settled.DEAD_UNSTARTED, "seconds": 0.0, "attempt": 1, "claimed_by": ""}, 0),
        ({"settled": Settled.FAILED, "outcome": DeadLettered("x", FAILURE), "attempt": 2}, 0),
    ],
)
def test_a_message_arrives_once(these: WorkerTotals, given: dict[str, Any], count: int) -> None:
    """At the end of its first attempt; a snoozed message starts that attempt again."""
    these.add([ended(**given)])
    _, arrived = take(these)
    assert sum(each.messages for each in arrived) == count


def test_queues_that_only_rows_know_do_not_pile_up(
    these: WorkerTotals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S27: beyond a number of pairs, the queues of a handler are counted together."""
    monkeypatch.setattr(worker_totals, "MAX_SOURCES", 3)
    for number in range(6):
        delivery = ended()
        row = delivery.delivery._row._replace(queue=f"q{number}")
        these.add([delivery._replace(delivery=type(delivery.delivery)(row))])
    rows, _ = take(these)
    assert [(row.queue, row.acked) for row in rows] == [("", 3), ("q0", 1), ("q1", 1), ("q2", 1)]
    assert these.read()["h"].acked == 6
    assert {source.queue: tally.acked for source, tally in these.by_source().items()} == {
        "": 3, "q0": 1, "q1": 1, "q2": 1
    }  # fmt: skip
