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
from django_mq.worker.hand import STUCK_AFTER, Hand
from django_mq.worker.pace import Pace
from django_mq.worker.tasks import Slice, Task

NOW = datetime(2030, 1, 1, tzinfo=UTC).timestamp()


def task(
    id: int, name: str = "h", *, suspect: bool = False, line: str | None = None, claim: int = 1
) -> Task:
    row = ClaimedRow(
        id=id, queue="mail", type="t", handler=name, schema_version=1, payload="{}",
        metadata="{}", priority=0, key=None, attempts=1, max_attempts=20, retry=None,
        claimed_by=f"me:{claim}", wants_result=False, suspect=suspect, held_for=None,
        created=NOW, claimed=NOW,
    )  # fmt: skip
    found = handlers.get(name)
    assert found is not None
    return Task(Delivery(row), found, 300.0, None if line is None else (line,))


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

    async def coroutine(delivery: Any) -> None: ...

    handler("coroutine", name="coroutine")(coroutine)


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
    tasks = [task(id, name) for id, name in enumerate(names, 1)]
    hand.hold(each.delivery for each in tasks)
    hand.put(tasks)


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
    tasks = [task(1), task(9)]
    hand.hold(each.delivery for each in tasks)
    hand.put(tasks[:1])
    assert hand.fences() == [("mail", Fence(1, 1, "me:1")), ("mail", Fence(9, 1, "me:1"))]
    assert hand.holds("mail")
    assert not hand.holds("post")
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
    hand.hold([task(5).delivery])
    hand.put([task(1, suspect=True)])
    assert take(hand) == [1]
    assert told.count >= 1


# ---- lines


def start(hand: Hand) -> Slice:
    """Take a slice that runs until `hand.done()`."""
    slice_ = hand.take()
    assert slice_ is not None
    return slice_


def ids(tasks: list[Task]) -> list[int]:
    return [each.delivery.id for each in tasks]


def lined(*names: str, handler: str = "h") -> list[Task]:
    """Return tasks with the ids 1, 2, 3... of the lines `names`; "-" is none."""
    return [
        task(id, handler, line=None if name == "-" else name) for id, name in enumerate(names, 1)
    ]


def test_of_a_line_one_slice_is_out_at_a_time(hand: Hand) -> None:
    """KAF-2: what follows waits, and others go on."""
    hand.put(lined("a", "a", "b", "a", "-"))
    first = start(hand)
    second, third = start(hand), start(hand)
    assert [ids(each.tasks) for each in (first, second, third)] == [[1], [3], [5]]
    assert hand.waiting() == 2
    hand.done(second)
    hand.done(first)
    assert [take(hand), take(hand)] == [[2], [4]]


def test_what_follows_comes_before_the_rest_when_its_line_is_free(hand: Hand) -> None:
    hand.put(lined("a", "a", "-", "-", "a"))
    first = start(hand)
    second = start(hand)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    hand.done(first)
    assert [take(hand), take(hand), take(hand)] == [[2], [4], [5]]


def test_several_of_a_line_share_a_slice(hand: Hand) -> None:
    """In order; and two slices never share a line."""
    hand.pace(task(1).handler).limit = 3
    hand.put(lined("a", "b", "a", "a", "c", "b", "c"))
    first, second = start(hand), start(hand)
    assert [ids(first.tasks), ids(second.tasks)] == [[1, 2, 3], [5, 7]]
    hand.done(first)
    hand.done(second)
    assert sorted(take(hand)) == [4, 6]


@pytest.mark.parametrize("name", ["unbound", "batch"])
def test_lines_of_other_kinds(hand: Hand, name: str) -> None:
    hand.put(lined("a", "a", "b", handler=name))
    first, second = start(hand), start(hand) if name == "unbound" else None
    if second is None:
        assert ids(first.tasks) == [1, 2, 3]
        return
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]


def test_what_did_not_start_goes_before_what_waits_for_its_line(hand: Hand) -> None:
    hand.pace(task(1).handler).limit = 3
    tasks = lined("a", "a", "a", "a", "-")
    hand.put(tasks)
    first = start(hand)
    assert ids(first.tasks) == [1, 2, 3]
    second = start(hand)
    assert ids(second.tasks) == [5]
    hand.put_back(tasks[1:3])
    assert hand.waiting() == 3
    hand.done(first)
    assert take(hand) == [2, 3, 4]


def test_a_broken_line_is_given_back(hand: Hand, told: Told) -> None:
    """PMQ-43: what is behind one that failed does not start, wherever it waits."""
    hand.pace(task(1).handler).limit = 2
    tasks = lined("a", "a", "a", "b", "a")
    hand.put(tasks)
    first = start(hand)
    assert ids(first.tasks) == [1, 2]
    second = start(hand)
    assert ids(second.tasks) == [4]
    hand.break_line(("a",))
    assert told.count >= 1
    assert hand.is_unwanted(tasks[1])
    assert not hand.is_unwanted(tasks[3])
    hand.put_back(tasks[1:2])
    assert sorted(ids(hand.take_given_back())) == [2, 3, 5]
    assert hand.take_given_back() == []
    assert hand.waiting() == 0
    hand.done(first)
    assert not hand.is_unwanted(tasks[1])
    hand.put([task(6, line="a", claim=2)])
    assert take(hand) == [6]


def test_a_line_of_which_nothing_is_out_is_not_broken_for_good(hand: Hand) -> None:
    """A lease that was lost long ago says nothing about the next claim."""
    hand.put(lined("a"))
    hand.break_line(("a",))
    assert ids(hand.take_given_back()) == [1]
    hand.put([task(2, line="a")])
    assert take(hand) == [2]


def test_a_suspect_waits_for_its_turn_in_its_line(hand: Hand) -> None:
    """Alone, after what is before it, before what is behind it."""
    hand.put([task(1, line="a"), task(2, line="a", suspect=True), task(3, line="a"), task(4)])
    first, second = start(hand), start(hand)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [4]]
    hand.done(second)
    hand.done(first)
    suspect = start(hand)
    assert suspect.alone
    assert ids(suspect.tasks) == [2]
    hand.done(suspect)
    assert take(hand) == [3]


def test_a_suspect_that_could_not_start_goes_first_in_its_line_again(hand: Hand) -> None:
    hand.put([task(1, line="a", suspect=True), task(2, line="a")])
    suspect = start(hand)
    hand.put_back(suspect.tasks)
    hand.done(suspect)
    again = start(hand)
    assert again.alone
    assert ids(again.tasks) == [1]
    hand.done(again)
    assert take(hand) == [2]


def test_everything_is_given_back_and_lines_are_free_again(hand: Hand) -> None:
    """Whatever it waits for: its line, its turn to be alone, a slot."""
    hand.enter()
    hand.put([*lined("a", "a", "-"), task(4, line="s", suspect=True), task(5, line="s")])
    first, second = start(hand), start(hand)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    assert hand.admit(task(6, "coroutine", line="c"))
    assert not hand.admit(task(7, "coroutine", line="c"))
    assert not hand.admit(task(8, "coroutine", line="c"))
    hand.leave(("c",))
    assert sorted(ids(hand.give_back())) == [2, 4, 5, 7, 8]
    assert hand.waiting() == 0
    assert hand.take_coroutines() == []
    hand.done(first)
    hand.done(second)
    hand.put([task(n, line=line, claim=2) for n, line in ((2, "a"), (4, "s"), (7, "c"))])
    assert [take(hand) for _ in range(3)] == [[2], [4], [7]]


def test_a_queue_that_is_shut_gives_back_what_waits_for_its_line(hand: Hand) -> None:
    hand.put(lined("a", "a", "b"))
    first, second = start(hand), start(hand)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    hand.shut("mail")
    assert ids(hand.take_given_back()) == [2]
    hand.done(first)
    hand.put([task(4, line="a")])
    assert ids(hand.take_given_back()) == [4]


def test_dropping_a_suspect_frees_what_is_behind_it(hand: Hand) -> None:
    """Only what is unwanted goes: the others of the line are not forgotten."""
    hand.enter()
    hand.put([task(1, line="a", suspect=True), task(2, line="a", claim=2), task(3)])
    slice_ = start(hand)
    assert ids(slice_.tasks) == [3]
    hand.drop(["mail"], keeping=["me:2"])
    assert ids(hand.take_given_back()) == [1]
    assert take(hand) == [2]


# ---- coroutines in lines


def test_coroutines_of_a_line_run_one_after_another(hand: Hand, told: Told) -> None:
    tasks = lined("a", "b", "a", "-", "a", handler="coroutine")
    assert [hand.admit(each) for each in tasks] == [True, True, False, True, False]
    assert hand.coroutines() == 2
    for _ in range(3):
        hand.enter()
    hand.leave(("b",))
    assert hand.take_coroutines() == []
    before = told.count
    hand.leave(("a",))
    assert told.count > before
    assert hand.coroutines() == 2  # one may start, the other waits for it
    assert ids(hand.take_coroutines()) == [3]
    assert hand.coroutines() == 1
    hand.enter()
    hand.leave(("a",))
    assert ids(hand.take_coroutines()) == [5]
    assert hand.coroutines() == 0


def test_a_line_of_coroutines_and_others_keeps_its_order(hand: Hand, told: Told) -> None:
    """In an ordered queue each message may have another kind of handler."""
    hand.put([task(1, line="a")])
    assert not hand.admit(task(2, "coroutine", line="a"))
    hand.put([task(3, line="a"), task(4, "unbound", line="a")])
    assert not hand.admit(task(5, "coroutine", line="a"))
    assert hand.coroutines() == 2
    order = []
    got: list[Slice | None] = []
    for _ in range(5):
        thread = Thread(target=lambda: got.append(hand.take()), daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        coroutines: list[Task] = []
        while not got and not coroutines and time.monotonic() < deadline:
            coroutines = hand.take_coroutines()
            thread.join(0.001)
        if coroutines:
            order += ids(coroutines)
            hand.enter()
            hand.leave(coroutines[0].line)
            if len(order) == 5:
                break
            thread.join(10)
        [slice_] = got
        got.clear()
        assert slice_ is not None
        order += ids(slice_.tasks)
        hand.done(slice_)
    assert order == [1, 2, 3, 4, 5]
    hand.close()


def test_a_suspect_coroutine_runs_alone_in_a_thread(hand: Hand) -> None:
    hand.put([task(1, "coroutine", line="a", suspect=True)])
    assert not hand.admit(task(2, "coroutine", line="a"))
    assert hand.coroutines() == 1
    suspect = start(hand)
    assert suspect.alone
    assert ids(suspect.tasks) == [1]
    hand.done(suspect)
    thread = Thread(target=hand.take, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    coroutines: list[Task] = []
    while not coroutines and time.monotonic() < deadline:
        coroutines = hand.take_coroutines()
        thread.join(0.001)
    assert ids(coroutines) == [2]
    hand.close()
    thread.join(10)


def test_a_broken_line_gives_its_coroutines_back(hand: Hand) -> None:
    tasks = lined("a", "a", "a", handler="coroutine")
    assert [hand.admit(each) for each in tasks] == [True, False, False]
    hand.enter()
    hand.break_line(("a",))
    assert ids(hand.take_given_back()) == [2, 3]
    hand.leave(("a",))
    assert hand.take_coroutines() == []
    assert hand.admit(task(2, "coroutine", line="a"))


def test_a_coroutine_whose_turn_it_is_waits_for_a_suspect_to_end(hand: Hand, told: Told) -> None:
    """Else it would be charged for a process that the suspect ends."""
    hand.put([task(1, line="a")])
    first = start(hand)
    hand.put([task(2, suspect=True)])
    assert not hand.admit(task(3, "coroutine", line="a"))
    hand.done(first)
    suspect = start(hand)
    assert suspect.alone
    assert hand.take_coroutines() == []
    before = told.count
    hand.done(suspect)
    assert told.count > before
    assert ids(hand.take_coroutines()) == [3]
