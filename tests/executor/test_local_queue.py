"""The local queue: slices, their pace, suspects, lines, and when `on_room` is called."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from threading import Thread
from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.executor import local_queue as local_queue_module
from django_mq.executor.local_queue import STUCK_AFTER, LocalQueue
from django_mq.executor.pace import Pace
from django_mq.executor.tasks import Slice, Task
from django_mq.messages import ClaimedRow, Delivery, Fence

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
def local_queue(told: Told) -> LocalQueue:
    return LocalQueue(batch=100, most=100, on_room=told)


def take(local_queue: LocalQueue) -> list[int]:
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.done(slice_)
    return [each.delivery.id for each in slice_.tasks]


def put(local_queue: LocalQueue, *names: str) -> None:
    tasks = [task(id, name) for id, name in enumerate(names, 1)]
    local_queue.hold(each.delivery for each in tasks)
    local_queue.put(tasks)


def test_slow_start(local_queue: LocalQueue) -> None:
    """The first slice of a handler is one message; slices double while they keep the time."""
    put(local_queue, *["h"] * 20)
    pace = local_queue.pace(task(1).handler)
    sizes = []
    for _ in range(4):
        ids = take(local_queue)
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


def test_a_slice_has_one_kind(local_queue: LocalQueue) -> None:
    """In order; handlers that are not atomic alone; batches of one handler."""
    for name in ("h", "i"):
        local_queue.pace(task(1, name).handler).limit = 3
    put(local_queue, "h", "i", "h", "unbound", "unbound", "h", "batch", "batch", "batch2", "h", "h")
    assert [take(local_queue) for _ in range(7)] == [
        [1, 2, 3],
        [4],
        [5],
        [6],
        [7, 8],
        [9],
        [10, 11],
    ]


def test_a_handler_at_its_limit_ends_the_slice(local_queue: LocalQueue) -> None:
    local_queue.pace(task(1, "h").handler).limit = 5
    local_queue.pace(task(1, "i").handler).limit = 2
    put(local_queue, "h", "i", "i", "i", "h")
    assert [take(local_queue), take(local_queue)] == [[1, 2, 3], [4, 5]]


def test_one_that_may_take_long_is_alone_in_its_slice(local_queue: LocalQueue) -> None:
    """PMQ-48: nobody else waits in the transaction of a handler that was never seen to be fast."""
    local_queue.pace(task(1, "h").handler).limit = 5
    put(local_queue, "h", "i", "h", "h")
    assert [take(local_queue), take(local_queue), take(local_queue)] == [[1], [2], [3, 4]]


def test_stuck_is_who_took_nothing_for_long_and_has_nobody_free(
    local_queue: LocalQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("django_mq.executor.local_queue.monotonic", lambda: now[0])
    put(local_queue, "h", "i", "h")
    slice_ = local_queue.take()
    assert slice_ is not None
    assert not local_queue.stuck()
    now[0] += STUCK_AFTER + 0.1
    assert local_queue.stuck()
    assert [each.delivery.id for each in local_queue.give_back()] == [2, 3]
    assert local_queue.waiting() == 0
    local_queue.done(slice_)
    before = told.count
    ended = Thread(target=local_queue.take)
    ended.start()  # it finds nothing, and says that it is free
    deadline = time.monotonic() + 10
    while told.count == before and time.monotonic() < deadline:
        ended.join(0.01)
    assert told.count > before
    local_queue.close()
    ended.join(10)
    assert not ended.is_alive()


def test_a_slice_has_no_more_than_a_batch(told: Told) -> None:
    """KAF-3: what waits comes together, up to the limit."""
    local_queue = LocalQueue(batch=3, most=3, on_room=told)
    put(local_queue, *["batch"] * 5)
    assert take(local_queue) == [1, 2, 3]
    assert take(local_queue) == [4, 5]


def test_unstarted_tasks_come_first_again(local_queue: LocalQueue) -> None:
    put(local_queue, "unbound", "unbound", "unbound")
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.put_back(slice_.tasks)
    local_queue.done(slice_)
    assert [take(local_queue) for _ in range(3)] == [[1], [2], [3]]


def test_a_suspect_runs_alone(local_queue: LocalQueue) -> None:
    local_queue.put([task(1), task(2, suspect=True), task(3)])
    first = local_queue.take()
    assert first is not None
    assert first.alone
    assert local_queue.exclusive()
    got: list[Slice | None] = []
    thread = threading.Thread(target=lambda: got.append(local_queue.take()), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    local_queue.done(first)
    thread.join(10)
    assert got[0] is not None
    assert not got[0].alone
    assert not local_queue.exclusive()


def test_a_suspect_waits_until_nothing_runs_and_others_go_on_meanwhile(
    local_queue: LocalQueue,
) -> None:
    local_queue.enter()
    local_queue.put([task(1, suspect=True), task(2)])
    slice_ = local_queue.take()
    assert slice_ is not None
    assert [each.delivery.id for each in slice_.tasks] == [2]
    local_queue.done(slice_)
    local_queue.leave(None)
    assert take(local_queue) == [1]


def test_a_suspect_that_waited_long_stops_the_others(
    local_queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_queue_module, "SUSPECT_PATIENCE", -1.0)
    local_queue.enter()
    local_queue.put([task(1, suspect=True), task(2)])
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(take(local_queue)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    local_queue.leave(None)
    thread.join(10)
    assert got == [1]


def test_a_suspect_that_could_not_start_is_a_suspect_still(local_queue: LocalQueue) -> None:
    """The database was lost before its slice was: it must not go among the others."""
    local_queue.put([task(1, suspect=True), task(2)])
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.put_back(slice_.tasks)
    local_queue.done(slice_)
    again = local_queue.take()
    assert again is not None
    assert again.alone
    assert [each.delivery.id for each in again.tasks] == [1]


def test_closing_returns_what_did_not_start_and_ends_the_takers(local_queue: LocalQueue) -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(local_queue.take()), daemon=True)
    thread.start()
    assert local_queue.close() == []
    thread.join(10)
    assert got == [None]
    local_queue.put([task(1), task(2, suspect=True)])
    assert local_queue.take() is None
    assert [each.delivery.id for each in local_queue.close()] == [1, 2]


def test_fences_are_held_until_settled(local_queue: LocalQueue, told: Told) -> None:
    tasks = [task(1), task(9)]
    local_queue.hold(each.delivery for each in tasks)
    local_queue.put(tasks[:1])
    assert [each.fence for each in local_queue.held()] == [Fence(1, 1, "me:1"), Fence(9, 1, "me:1")]
    assert local_queue.holds("mail")
    assert not local_queue.holds("post")
    assert not local_queue.idle()
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.settled([1, 9])
    assert local_queue.held() == []
    assert not local_queue.idle()
    before = told.count
    local_queue.done(slice_)
    assert local_queue.idle()
    assert told.count == before + 1


def test_tells_when_few_are_left(local_queue: LocalQueue, told: Told) -> None:
    """NSQ-24: before the local queue is empty, and not for each message."""
    put(local_queue, *["unbound"] * 4)
    local_queue.tell_below(2)
    counts = []
    for _ in range(4):
        take(local_queue)
        counts.append(told.count)
    assert counts == [0, 0, 1, 1]  # once, when it fell below


def test_async_handlers_may_start_again_after_a_suspect(
    local_queue: LocalQueue, told: Told
) -> None:
    """Whoever claims for them was told that there is no room."""
    local_queue.hold([task(5).delivery])
    local_queue.put([task(1, suspect=True)])
    assert take(local_queue) == [1]
    assert told.count >= 1


# ---- lines


def start(local_queue: LocalQueue) -> Slice:
    """Take a slice that runs until `hand.done()`."""
    slice_ = local_queue.take()
    assert slice_ is not None
    return slice_


def ids(tasks: list[Task]) -> list[int]:
    return [each.delivery.id for each in tasks]


def lined(*names: str, handler: str = "h") -> list[Task]:
    """Return tasks with the ids 1, 2, 3... of the lines `names`; "-" is none."""
    return [
        task(id, handler, line=None if name == "-" else name) for id, name in enumerate(names, 1)
    ]


def test_of_a_line_one_slice_is_out_at_a_time(local_queue: LocalQueue) -> None:
    """KAF-2: what follows waits, and others go on."""
    local_queue.put(lined("a", "a", "b", "a", "-"))
    first = start(local_queue)
    second, third = start(local_queue), start(local_queue)
    assert [ids(each.tasks) for each in (first, second, third)] == [[1], [3], [5]]
    assert local_queue.waiting() == 2
    local_queue.done(second)
    local_queue.done(first)
    assert [take(local_queue), take(local_queue)] == [[2], [4]]


def test_the_next_of_a_free_line_comes_before_the_rest(local_queue: LocalQueue) -> None:
    local_queue.put(lined("a", "a", "-", "-", "a"))
    first = start(local_queue)
    second = start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    local_queue.done(first)
    assert [take(local_queue), take(local_queue), take(local_queue)] == [[2], [4], [5]]


def test_several_of_a_line_share_a_slice(local_queue: LocalQueue) -> None:
    """In order; and two slices never share a line."""
    local_queue.pace(task(1).handler).limit = 3
    local_queue.put(lined("a", "b", "a", "a", "c", "b", "c"))
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1, 2, 3], [5, 7]]
    local_queue.done(first)
    local_queue.done(second)
    assert sorted(take(local_queue)) == [4, 6]


@pytest.mark.parametrize("name", ["unbound", "batch"])
def test_lines_of_other_kinds(local_queue: LocalQueue, name: str) -> None:
    local_queue.put(lined("a", "a", "b", handler=name))
    first, second = start(local_queue), start(local_queue) if name == "unbound" else None
    if second is None:
        assert ids(first.tasks) == [1, 2, 3]
        return
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]


def test_unstarted_tasks_go_before_those_that_wait_for_their_line(local_queue: LocalQueue) -> None:
    local_queue.pace(task(1).handler).limit = 3
    tasks = lined("a", "a", "a", "a", "-")
    local_queue.put(tasks)
    first = start(local_queue)
    assert ids(first.tasks) == [1, 2, 3]
    second = start(local_queue)
    assert ids(second.tasks) == [5]
    local_queue.put_back(tasks[1:3])
    assert local_queue.waiting() == 3
    local_queue.done(first)
    assert take(local_queue) == [2, 3, 4]


def test_a_broken_line_is_given_back(local_queue: LocalQueue, told: Told) -> None:
    """PMQ-43: what is behind one that failed does not start, wherever it waits."""
    local_queue.pace(task(1).handler).limit = 2
    tasks = lined("a", "a", "a", "b", "a")
    local_queue.put(tasks)
    first = start(local_queue)
    assert ids(first.tasks) == [1, 2]
    second = start(local_queue)
    assert ids(second.tasks) == [4]
    local_queue.break_line(("a",))
    assert told.count >= 1
    assert local_queue.is_unwanted(tasks[1])
    assert not local_queue.is_unwanted(tasks[3])
    local_queue.put_back(tasks[1:2])
    assert sorted(ids(local_queue.take_given_back())) == [2, 3, 5]
    assert local_queue.take_given_back() == []
    assert local_queue.waiting() == 0
    local_queue.done(first)
    assert not local_queue.is_unwanted(tasks[1])
    local_queue.put([task(6, line="a", claim=2)])
    assert take(local_queue) == [6]


def test_a_line_of_which_nothing_is_out_is_not_broken_for_good(local_queue: LocalQueue) -> None:
    """A lease that was lost long ago says nothing about the next claim."""
    local_queue.put(lined("a"))
    local_queue.break_line(("a",))
    assert ids(local_queue.take_given_back()) == [1]
    local_queue.put([task(2, line="a")])
    assert take(local_queue) == [2]


def test_a_suspect_waits_for_its_turn_in_its_line(local_queue: LocalQueue) -> None:
    """Alone, after what is before it, before what is behind it."""
    local_queue.put(
        [task(1, line="a"), task(2, line="a", suspect=True), task(3, line="a"), task(4)]
    )
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [4]]
    local_queue.done(second)
    local_queue.done(first)
    suspect = start(local_queue)
    assert suspect.alone
    assert ids(suspect.tasks) == [2]
    local_queue.done(suspect)
    assert take(local_queue) == [3]


def test_a_suspect_that_could_not_start_goes_first_in_its_line_again(
    local_queue: LocalQueue,
) -> None:
    local_queue.put([task(1, line="a", suspect=True), task(2, line="a")])
    suspect = start(local_queue)
    local_queue.put_back(suspect.tasks)
    local_queue.done(suspect)
    again = start(local_queue)
    assert again.alone
    assert ids(again.tasks) == [1]
    local_queue.done(again)
    assert take(local_queue) == [2]


def test_everything_is_given_back_and_lines_are_free_again(local_queue: LocalQueue) -> None:
    """Whatever it waits for: its line, its turn to be alone, a slot."""
    local_queue.enter()
    local_queue.put([*lined("a", "a", "-"), task(4, line="s", suspect=True), task(5, line="s")])
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    assert local_queue.admit(task(6, "coroutine", line="c"))
    assert not local_queue.admit(task(7, "coroutine", line="c"))
    assert not local_queue.admit(task(8, "coroutine", line="c"))
    local_queue.leave(("c",))
    assert sorted(ids(local_queue.give_back())) == [2, 4, 5, 7, 8]
    assert local_queue.waiting() == 0
    assert local_queue.take_coroutines() == []
    local_queue.done(first)
    local_queue.done(second)
    local_queue.put([task(n, line=line, claim=2) for n, line in ((2, "a"), (4, "s"), (7, "c"))])
    assert [take(local_queue) for _ in range(3)] == [[2], [4], [7]]


def test_a_queue_that_is_shut_gives_back_what_waits_for_its_line(local_queue: LocalQueue) -> None:
    local_queue.put(lined("a", "a", "b"))
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    local_queue.stop_queue("mail")
    assert ids(local_queue.take_given_back()) == [2]
    local_queue.done(first)
    local_queue.put([task(4, line="a")])
    assert ids(local_queue.take_given_back()) == [4]


def test_dropping_a_suspect_frees_what_is_behind_it(local_queue: LocalQueue) -> None:
    """Only what is unwanted goes: the others of the line are not forgotten."""
    local_queue.enter()
    local_queue.put([task(1, line="a", suspect=True), task(2, line="a", claim=2), task(3)])
    slice_ = start(local_queue)
    assert ids(slice_.tasks) == [3]
    local_queue.drop(["mail"], keeping=["me:2"])
    assert ids(local_queue.take_given_back()) == [1]
    assert take(local_queue) == [2]


# ---- coroutines in lines


def test_coroutines_of_a_line_run_one_after_another(local_queue: LocalQueue, told: Told) -> None:
    tasks = lined("a", "b", "a", "-", "a", handler="coroutine")
    assert [local_queue.admit(each) for each in tasks] == [True, True, False, True, False]
    assert local_queue.coroutines() == 2
    for _ in range(3):
        local_queue.enter()
    local_queue.leave(("b",))
    assert local_queue.take_coroutines() == []
    before = told.count
    local_queue.leave(("a",))
    assert told.count > before
    assert local_queue.coroutines() == 2  # one may start, the other waits for it
    assert ids(local_queue.take_coroutines()) == [3]
    assert local_queue.coroutines() == 1
    local_queue.enter()
    local_queue.leave(("a",))
    assert ids(local_queue.take_coroutines()) == [5]
    assert local_queue.coroutines() == 0


def test_a_line_of_coroutines_and_others_keeps_its_order(
    local_queue: LocalQueue, told: Told
) -> None:
    """In an ordered queue each message may have another kind of handler."""
    local_queue.put([task(1, line="a")])
    assert not local_queue.admit(task(2, "coroutine", line="a"))
    local_queue.put([task(3, line="a"), task(4, "unbound", line="a")])
    assert not local_queue.admit(task(5, "coroutine", line="a"))
    assert local_queue.coroutines() == 2
    order = []
    got: list[Slice | None] = []
    for _ in range(5):
        thread = Thread(target=lambda: got.append(local_queue.take()), daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        coroutines: list[Task] = []
        while not got and not coroutines and time.monotonic() < deadline:
            coroutines = local_queue.take_coroutines()
            thread.join(0.001)
        if coroutines:
            order += ids(coroutines)
            local_queue.enter()
            local_queue.leave(coroutines[0].line)
            if len(order) == 5:
                break
            thread.join(10)
        [slice_] = got
        got.clear()
        assert slice_ is not None
        order += ids(slice_.tasks)
        local_queue.done(slice_)
    assert order == [1, 2, 3, 4, 5]
    local_queue.close()


def test_a_suspect_coroutine_runs_alone_in_a_thread(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "coroutine", line="a", suspect=True)])
    assert not local_queue.admit(task(2, "coroutine", line="a"))
    assert local_queue.coroutines() == 1
    suspect = start(local_queue)
    assert suspect.alone
    assert ids(suspect.tasks) == [1]
    local_queue.done(suspect)
    thread = Thread(target=local_queue.take, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    coroutines: list[Task] = []
    while not coroutines and time.monotonic() < deadline:
        coroutines = local_queue.take_coroutines()
        thread.join(0.001)
    assert ids(coroutines) == [2]
    local_queue.close()
    thread.join(10)


def test_a_broken_line_gives_its_coroutines_back(local_queue: LocalQueue) -> None:
    tasks = lined("a", "a", "a", handler="coroutine")
    assert [local_queue.admit(each) for each in tasks] == [True, False, False]
    local_queue.enter()
    local_queue.break_line(("a",))
    assert ids(local_queue.take_given_back()) == [2, 3]
    local_queue.leave(("a",))
    assert local_queue.take_coroutines() == []
    assert local_queue.admit(task(2, "coroutine", line="a"))


def test_a_coroutine_whose_turn_it_is_waits_for_a_suspect_to_end(
    local_queue: LocalQueue, told: Told
) -> None:
    """Else it would be charged for a process that the suspect ends."""
    local_queue.put([task(1, line="a")])
    first = start(local_queue)
    local_queue.put([task(2, suspect=True)])
    assert not local_queue.admit(task(3, "coroutine", line="a"))
    local_queue.done(first)
    suspect = start(local_queue)
    assert suspect.alone
    assert local_queue.take_coroutines() == []
    before = told.count
    local_queue.done(suspect)
    assert told.count > before
    assert ids(local_queue.take_coroutines()) == [3]
