"""Lists for batch handlers outside transactions: their length, and the wait until they are full."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import handler
from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Task
from django_mq.messages import Delivery
from tests.executor.local_queue.conftest import Told, ids, start, take, task

FAR = 3600.0


@pytest.fixture(autouse=True)
def _lists() -> None:
    for name, options in {
        "list": {},
        "short": {"max_batch": 2},
        "slow": {"max_batch": 3, "linger": FAR},
        "brief": {"linger": 0.01},
    }.items():

        def function(deliveries: Any) -> None: ...

        handler(name, name=name, batch=True, atomic=False, **options)(function)  # type: ignore[arg-type]


def again(id: int, name: str, **given: Any) -> Task:
    """Return a task of a later attempt."""
    first = task(id, name, **given)
    return first._replace(delivery=Delivery(first.delivery._row._replace(attempts=2)))


def test_a_list_has_the_messages_of_one_handler(local_queue: LocalQueue) -> None:
    names = ("list", "list", "short", "short", "short", "batch", "unbound", "list")
    local_queue.put(task(id, name) for id, name in enumerate(names))
    assert [take(local_queue) for _ in range(5)] == [[0, 1, 7], [2, 3], [4], [5], [6]]


@pytest.mark.parametrize("name", ["list", "batch"])
def test_a_list_has_messages_from_behind_those_of_other_handlers(
    local_queue: LocalQueue, name: str
) -> None:
    """They keep their order. Else lists in a queue with other handlers would be short."""
    names = (name, "h", name, "unbound", name, "h")
    local_queue.put(task(id, each) for id, each in enumerate(names))
    assert [take(local_queue) for _ in range(4)] == [[0, 2, 4], [1], [3], [5]]


def test_a_list_overtakes_nothing_of_a_line(local_queue: LocalQueue) -> None:
    """In an ordered queue, the messages of all handlers are one line."""
    lines = [("list", "a"), ("h", "b"), ("list", "b"), ("list", "a"), ("list", "b"), ("list", "-")]
    tasks = [
        task(id, name, line=None if line == "-" else line) for id, (name, line) in enumerate(lines)
    ]
    local_queue.put(tasks)
    assert [take(local_queue) for _ in range(3)] == [[0, 3, 5], [1], [2, 4]]


def test_a_list_leaves_out_what_waits_for_its_line(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "h", line="a")])
    running = start(local_queue)
    local_queue.put([task(2, "list"), task(3, "list", line="a"), task(4, "list")])
    assert take(local_queue) == [2, 4]
    local_queue.done(running)
    assert take(local_queue) == [3]


@pytest.mark.parametrize("name", ["list", "batch"])
def test_later_attempts_run_singly(local_queue: LocalQueue, name: str) -> None:
    """Also inside a transaction: a message that hangs would time its neighbours out again."""
    local_queue.put([task(1, name), again(2, name), again(3, name), task(4, name)])
    assert [take(local_queue) for _ in range(3)] == [[1, 4], [2], [3]]


def test_a_list_has_the_messages_of_a_line_in_order(local_queue: LocalQueue) -> None:
    local_queue.put(task(id, "list", line=line) for id, line in enumerate("abab"))
    slice_ = start(local_queue)
    assert ids(slice_.tasks) == [0, 1, 2, 3]
    assert slice_.lines == {("a",), ("b",)}


def test_a_list_that_lingers_starts_when_it_is_full(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "slow"), task(2, "slow"), task(3, "h")])
    assert take(local_queue) == [3]  # it delays no other task
    assert local_queue.waiting() == 2
    local_queue.put([task(4, "slow"), task(5, "slow")])
    assert take(local_queue) == [1, 2, 4]
    assert local_queue.waiting() == 1


def test_a_list_that_lingers_starts_when_its_time_is_over(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "brief"), task(2, "brief")])
    assert take(local_queue) == [1, 2]


def test_a_linger_is_bounded(told: Told) -> None:
    local_queue = LocalQueue(batch=9, slice_size=9, poke=told, max_linger=0.01, slots=Slots(100))
    local_queue.put([task(1, "slow")])
    assert take(local_queue) == [1]


def test_a_later_attempt_does_not_linger(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "slow"), again(2, "slow")])
    assert take(local_queue) == [2]


def test_later_attempt_of_a_key_does_not_overtake_a_lingering_one(local_queue: LocalQueue) -> None:
    first, later = task(1, "slow", line="a"), again(2, "slow", line="a")
    local_queue.put(
        each._replace(delivery=Delivery(each.delivery._row._replace(key="k")))
        for each in (first, later)
    )
    assert take(local_queue) == [1]
    assert take(local_queue) == [2]


def test_lingering_tasks_are_released_with_the_rest(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "slow"), task(2, "h")])
    assert sorted(ids(local_queue.take_waiting())) == [1, 2]
    assert local_queue.waiting() == 0


def test_lingering_tasks_of_a_halted_line_are_released(local_queue: LocalQueue) -> None:
    local_queue.put([task(1, "slow", line="a"), task(2, "slow", line="b")])
    local_queue.halt_line(("a",))
    assert ids(local_queue.take_to_release()) == [1]
    assert local_queue.waiting() == 1


def test_a_list_that_lingers_is_bounded_by_the_batch_of_each_of_its_queues(
    local_queue: LocalQueue,
) -> None:
    short = [task(id, "slow")._replace(batch_size=2) for id in (2, 3)]
    local_queue.put([task(1, "slow"), *short])
    assert take(local_queue) == [2, 3]
    local_queue.put([task(4, "slow"), task(5, "slow")])
    assert take(local_queue) == [1, 4, 5]


def test_calls_count_the_lists_of_a_queue_by_its_batch(local_queue: LocalQueue) -> None:
    local_queue.put(task(id, "list")._replace(batch_size=1) for id in range(3))
    assert local_queue.calls() == 3


def test_calls_count_a_full_list_once(local_queue: LocalQueue) -> None:
    """A partial list counts as no call: more tasks may join it."""
    local_queue.put([task(id, "short") for id in range(5)])
    local_queue.put([again(5, "short"), task(6, "h"), task(7, "slow")])
    assert local_queue.calls() == 2 + 2
