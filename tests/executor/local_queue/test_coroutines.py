"""Coroutines in lines of the local queue."""

from __future__ import annotations

import time
from threading import Thread

from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Slice, Task
from tests.executor.local_queue.conftest import (
    Told,
    dispatch,
    dispatch_first,
    ids,
    lined,
    start,
    task,
)
from tests.waiting import SOON, until


def test_coroutines_of_a_line_run_one_after_another(local_queue: LocalQueue, told: Told) -> None:
    tasks = lined("a", "b", "a", "-", "a", handler="coroutine")
    assert ids(dispatch(local_queue, tasks)) == [1, 2, 4]
    assert local_queue.coroutines.count() == 2
    local_queue.coroutines_done(("b",))
    assert local_queue.coroutines.take() == []
    before = told.count
    local_queue.coroutines_done(("a",))
    assert told.count > before
    assert local_queue.coroutines.count() == 2  # one may start, the other waits for it
    assert ids(local_queue.coroutines.take()) == [3]
    assert local_queue.coroutines.count() == 1
    local_queue.coroutines_done(("a",))
    assert ids(local_queue.coroutines.take()) == [5]
    assert local_queue.coroutines.count() == 0


def test_a_line_of_coroutines_and_others_keeps_its_order(
    local_queue: LocalQueue, told: Told
) -> None:
    """In an ordered queue messages may have different kinds of handlers."""
    kinds = ["h", "coroutine", "h", "unbound", "coroutine"]
    tasks = [task(id, kind, line="a") for id, kind in enumerate(kinds, 1)]
    assert dispatch(local_queue, tasks) == []
    assert local_queue.coroutines.count() == 2
    assert run_all(local_queue, 5) == [1, 2, 3, 4, 5]


def test_first_tasks_keep_their_order_and_precede_their_line(
    local_queue: LocalQueue,
) -> None:
    """Whether it is a coroutine or not, and whether anything of its line waits, or not yet."""
    dispatch(local_queue, [task(6, line="a"), task(7, "coroutine", line="a"), task(8, line="b")])
    kinds = ["h", "coroutine", "h", "coroutine", "h"]
    first = [task(id, kind, line="a") for id, kind in enumerate(kinds, 1)]
    assert dispatch_first(local_queue, first) == []
    assert local_queue.coroutines.count() == 3
    order = run_all(local_queue, 8)
    assert [id for id in order if id != 8] == [1, 2, 3, 4, 5, 6, 7]


def test_a_coroutine_that_goes_first_starts_unless_its_line_is_busy(
    local_queue: LocalQueue,
) -> None:
    dispatch(local_queue, [task(1, line="a"), task(2, line="b"), task(3, "coroutine", line="b")])
    running = start(local_queue)
    assert ids(running.tasks) == [1]
    first = [task(4, "coroutine", line="a"), task(5, "coroutine")]
    first += [task(n, "coroutine", line="b") for n in (6, 7)]
    assert ids(dispatch_first(local_queue, first)) == [5, 6]
    local_queue.done(running)
    assert ids(local_queue.coroutines.take()) == [4]
    local_queue.coroutines_done(("b",))
    assert ids(local_queue.coroutines.take()) == [7]


def test_a_task_that_must_not_run_here_is_announced(local_queue: LocalQueue, told: Told) -> None:
    """Both the claiming thread and an executor whose row was locked may add one."""
    local_queue.stop_queue("mail")
    assert told.count == 0
    dispatch(local_queue, [task(1), task(2, "coroutine")])
    assert told.count == 1
    assert ids(local_queue.take_to_release()) == [1, 2]


def run_all(local_queue: LocalQueue, count: int) -> list[int]:
    """Run `count` tasks one after another, whatever their kind; return their ids in order."""
    order: list[int] = []
    got: list[Slice | None] = []
    while len(order) < count:
        thread = Thread(target=lambda: got.append(local_queue.take()), daemon=True)
        thread.start()
        deadline = time.monotonic() + SOON
        coroutines: list[Task] = []
        while not got and not coroutines and time.monotonic() < deadline:
            coroutines = local_queue.coroutines.take()
            thread.join(0.001)
        if coroutines:
            order += ids(coroutines)
            local_queue.coroutines_done(coroutines[0].line)
            if len(order) == count:
                break
            thread.join(SOON)
        [slice_] = got
        got.clear()
        assert slice_ is not None
        order += ids(slice_.tasks)
        local_queue.done(slice_)
    local_queue.close()
    return order


def test_a_suspect_coroutine_runs_alone_in_its_line(local_queue: LocalQueue) -> None:
    dispatch(local_queue, [task(1, "coroutine", line="a", suspect=True)])
    assert dispatch(local_queue, [task(2, "coroutine", line="a"), task(3, "coroutine")]) != []
    assert local_queue.coroutines.count() == 1
    thread = Thread(target=local_queue.take, daemon=True)
    thread.start()
    thread.join(0.05)
    assert local_queue.coroutines.take() == []
    local_queue.coroutines_done(None)
    assert ids(until(local_queue.coroutines.take)) == [1]
    assert local_queue.coroutines.take() == []
    local_queue.coroutines_done(("a",))
    assert ids(until(local_queue.coroutines.take)) == [2]
    local_queue.close()
    thread.join(SOON)


def test_a_halted_line_gives_its_coroutines_back(local_queue: LocalQueue) -> None:
    tasks = lined("a", "a", "a", handler="coroutine")
    assert ids(dispatch(local_queue, tasks)) == [1]
    local_queue.halt_line(("a",))
    assert ids(local_queue.take_to_release()) == [2, 3]
    local_queue.coroutines_done(("a",))
    assert local_queue.coroutines.take() == []
    assert ids(dispatch(local_queue, [task(2, "coroutine", line="a")])) == [2]


def test_a_coroutine_whose_turn_it_is_waits_for_a_suspect_to_end(
    local_queue: LocalQueue, told: Told
) -> None:
    """Otherwise it would be charged if the suspect killed the process."""
    dispatch(local_queue, [task(1, line="a")])
    first = start(local_queue)
    dispatch(local_queue, [task(2, suspect=True)])
    assert dispatch(local_queue, [task(3, "coroutine", line="a")]) == []
    local_queue.done(first)
    suspect = start(local_queue)
    assert suspect.alone
    assert local_queue.coroutines.take() == []
    before = told.count
    local_queue.done(suspect)
    assert told.count > before
    assert ids(local_queue.coroutines.take()) == [3]
