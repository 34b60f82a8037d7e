"""What is in hand: slices, their pace, suspects, and who is told when there is room."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.messages import ClaimedRow, Delivery, Fence
from django_mq.worker import hand as hand_module
from django_mq.worker.hand import STUCK_AFTER, Hand, Pace, Slice, Task

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def task(id: int, name: str = "h", *, suspect: bool = False) -> Task:
    row = ClaimedRow(
        id=id, queue="mail", type="t", handler=name, schema_version=1, payload="{}",
        metadata="{}", priority=0, key=None, attempts=1, max_attempts=20, retry=None,
        claimed_by="me:1", wants_result=False, suspect=suspect, held_for=None,
        created_at=NOW, claimed_at=NOW,
    )  # fmt: skip
    found = handlers.get(name)
    assert found is not None
    return Task(Delivery(row), found, 300.0)


@pytest.fixture(autouse=True)
def _handlers() -> None:
    for name, options in {
        "h": {},
        "i": {},
        "unbound": {"atomic": False},
        "batch": {"batch": True},
        "batch2": {"batch": True},
    }.items():

        def function(delivery: Any) -> None: ...

        handler(name, name=name, **options)(function)  # type: ignore[arg-type]


class Told:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def hand(told: Told) -> Hand:
    return Hand(batch=100, most=100, on_room=told)


def take(hand: Hand) -> list[int]:
    slice_ = hand.take()
    assert slice_ is not None
    hand.done(slice_)
    return [each.delivery.id for each in slice_.tasks]


def put(hand: Hand, *names: str) -> None:
    hand.put(task(id, name) for id, name in enumerate(names, 1))


def test_slow_start(hand: Hand) -> None:
    """The first slice of a handler is one message; slices double while they keep the time."""
    put(hand, *["h"] * 20)
    pace = hand.pace(task(1).handler)
    sizes = []
    for _ in range(4):
        ids = take(hand)
        sizes.append(len(ids))
        pace.kept_time(len(ids), 100)
    assert sizes == [1, 2, 4, 8]


def test_the_pace_of_a_handler() -> None:
    pace = Pace()
    for _ in range(10):
        pace.kept_time(pace.limit, 100)
    assert pace.limit == 100
    pace.overran()
    assert pace.limit == 50
    pace.kept_time(49, 100)  # a slice that was not full says nothing
    assert pace.limit == 50
    pace.conflict()
    assert pace.limit == 1
    pace.kept_time(1, 100)
    assert pace.limit == 1
    for _ in range(600):
        pace.kept_time(1, 100)
    assert pace.limit > 1
    for _ in range(20):
        pace.overran()
    assert pace.limit == 1


def test_a_slice_has_one_kind(hand: Hand) -> None:
    """In order; handlers that are not atomic alone; batches of one handler."""
    for name in ("h", "i"):
        hand.pace(task(1, name).handler).limit = 3
    put(hand, "h", "i", "h", "unbound", "unbound", "h", "batch", "batch", "batch2", "h", "h")
    assert [take(hand) for _ in range(7)] == [[1, 2, 3], [4], [5], [6], [7, 8], [9], [10, 11]]


def test_a_handler_at_its_limit_ends_the_slice(hand: Hand) -> None:
    hand.pace(task(1, "h").handler).limit = 5
    hand.pace(task(1, "i").handler).limit = 2
    put(hand, "h", "i", "i", "i", "h")
    assert [take(hand), take(hand)] == [[1, 2, 3], [4, 5]]


def test_one_that_may_take_long_is_alone_in_its_slice(hand: Hand) -> None:
    """PMQ-48: nobody else waits in the transaction of a handler that was never seen to be fast."""
    hand.pace(task(1, "h").handler).limit = 5
    put(hand, "h", "i", "h", "h")
    assert [take(hand), take(hand), take(hand)] == [[1], [2], [3, 4]]


def test_stuck_is_who_took_nothing_for_long_and_has_nobody_free(
    hand: Hand, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("django_mq.worker.hand.monotonic", lambda: now[0])
    put(hand, "h", "i", "h")
    slice_ = hand.take()
    assert slice_ is not None
    assert not hand.stuck()
    now[0] += STUCK_AFTER + 0.1
    assert hand.stuck()
    assert [each.delivery.id for each in hand.give_back()] == [2, 3]
    assert hand.waiting() == 0
    hand.done(slice_)
    before = told.count
    ended = Thread(target=hand.take)
    ended.start()  # it finds nothing, and says that it is free
    deadline = time.monotonic() + 10
    while told.count == before and time.monotonic() < deadline:
        ended.join(0.01)
    assert told.count > before
    hand.close()
    ended.join(10)
    assert not ended.is_alive()


def test_a_slice_has_no_more_than_a_batch(told: Told) -> None:
    """KAF-3: what waits comes together, up to the limit."""
    hand = Hand(batch=3, most=3, on_room=told)
    put(hand, *["batch"] * 5)
    assert take(hand) == [1, 2, 3]
    assert take(hand) == [4, 5]


def test_what_did_not_start_comes_first_again(hand: Hand) -> None:
    put(hand, "unbound", "unbound", "unbound")
    slice_ = hand.take()
    assert slice_ is not None
    hand.put_back(slice_.tasks)
    hand.done(slice_)
    assert [take(hand) for _ in range(3)] == [[1], [2], [3]]


def test_a_suspect_runs_alone(hand: Hand) -> None:
    hand.put([task(1), task(2, suspect=True), task(3)])
    first = hand.take()
    assert first is not None
    assert first.alone
    assert hand.exclusive()
    got: list[Slice | None] = []
    thread = threading.Thread(target=lambda: got.append(hand.take()), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    hand.done(first)
    thread.join(10)
    assert got[0] is not None
    assert not got[0].alone
    assert not hand.exclusive()


def test_a_suspect_waits_until_nothing_runs_and_others_go_on_meanwhile(hand: Hand) -> None:
    hand.enter()
    hand.put([task(1, suspect=True), task(2)])
    slice_ = hand.take()
    assert slice_ is not None
    assert [each.delivery.id for each in slice_.tasks] == [2]
    hand.done(slice_)
    hand.leave(None)
    assert take(hand) == [1]


def test_a_suspect_that_waited_long_stops_the_others(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_module, "SUSPECT_PATIENCE", -1.0)
    hand.enter()
    hand.put([task(1, suspect=True), task(2)])
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(take(hand)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    hand.leave(None)
    thread.join(10)
    assert got == [1]


def test_a_suspect_that_could_not_start_is_a_suspect_still(hand: Hand) -> None:
    """The database was lost before its slice was: it must not go among the others."""
    hand.put([task(1, suspect=True), task(2)])
    slice_ = hand.take()
    assert slice_ is not None
    hand.put_back(slice_.tasks)
    hand.done(slice_)
    again = hand.take()
    assert again is not None
    assert again.alone
    assert [each.delivery.id for each in again.tasks] == [1]


def test_closing_returns_what_did_not_start_and_ends_the_takers(hand: Hand) -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(hand.take()), daemon=True)
    thread.start()
    assert hand.close() == []
    thread.join(10)
    assert got == [None]
    hand.put([task(1), task(2, suspect=True)])
    assert hand.take() is None
    assert [each.delivery.id for each in hand.close()] == [1, 2]


def test_fences_are_held_until_settled(hand: Hand, told: Told) -> None:
    fence = Fence(9, 1, "me:1")
    hand.hold([("post", fence)])
    put(hand, "unbound")
    assert sorted(hand.fences()) == [("mail", Fence(1, 1, "me:1")), ("post", fence)]
    assert not hand.idle()
    slice_ = hand.take()
    assert slice_ is not None
    hand.settled([1, 9])
    assert hand.fences() == []
    assert not hand.idle()
    before = told.count
    hand.done(slice_)
    assert hand.idle()
    assert told.count == before + 1


def test_tells_when_few_are_left(hand: Hand, told: Told) -> None:
    """NSQ-24: before the hand is empty, and not for each message."""
    put(hand, *["unbound"] * 4)
    hand.tell_below(2)
    counts = []
    for _ in range(4):
        take(hand)
        counts.append(told.count)
    assert counts == [0, 0, 1, 1]  # once, when it fell below


def test_async_handlers_may_start_again_after_a_suspect(hand: Hand, told: Told) -> None:
    """Whoever claims for them was told that there is no room."""
    hand.hold([("mail", Fence(5, 1, "me:1"))])
    hand.put([task(1, suspect=True)])
    assert take(hand) == [1]
    assert told.count >= 1
