"""Coroutines in lines of the local queue."""

from __future__ import annotations

import time
from threading import Thread

from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Slice, Task
from tests.executor.local_queue.conftest import Told, ids, lined, start, task


def test_coroutines_of_a_line_run_one_after_another(local_queue: LocalQueue, told: Told) -> None:
    tasks = lined("a", "b", "a", "-", "a", handler="coroutine")
    assert [local_queue.admit(each) for each in tasks] == [True, True, False, True, False]
    assert local_queue.coroutines() == 2
    for _ in range(3):
        local_queue.begin_calls()
    local_queue.end_calls(("b",))
    assert local_queue.take_coroutines() == []
    before = told.count
    local_queue.end_calls(("a",))
    assert told.count > before
    assert local_queue.coroutines() == 2  # one may start, the other waits for it
    assert ids(local_queue.take_coroutines()) == [3]
    assert local_queue.coroutines() == 1
    local_queue.begin_calls()
    local_queue.end_calls(("a",))
    assert ids(local_queue.take_coroutines()) == [5]
    assert local_queue.coroutines() == 0


def test_a_line_of_coroutines_and_others_keeps_its_order(
    local_queue: LocalQueue, told: Told
) -> None:
    """In an ordered queue messages may have different kinds of handlers."""
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
            local_queue.begin_calls()
            local_queue.end_calls(coroutines[0].line)
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
    local_queue.begin_calls()
    local_queue.break_line(("a",))
    assert ids(local_queue.take_to_release()) == [2, 3]
    local_queue.end_calls(("a",))
    assert local_queue.take_coroutines() == []
    assert local_queue.admit(task(2, "coroutine", line="a"))


def test_a_coroutine_whose_turn_it_is_waits_for_a_suspect_to_end(
    local_queue: LocalQueue, told: Told
) -> None:
    """Otherwise it would be charged if the suspect killed the process."""
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
