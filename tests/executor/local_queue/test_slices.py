"""The local queue: slices, their pace, and when it pokes the loop."""

from __future__ import annotations

import threading
import time
from threading import Thread
from typing import Any

import pytest

from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import STUCK_AFTER, LocalQueue
from django_mq.executor.pace import Pace
from django_mq.messages import Fence
from tests.executor.local_queue.conftest import Told, take, task
from tests.waiting import SOON, until


def put(local_queue: LocalQueue, *names: str) -> None:
    tasks = [task(id, name) for id, name in enumerate(names, 1)]
    local_queue.unsettled.add(each.delivery for each in tasks)
    local_queue.put(tasks)


def test_slow_start(local_queue: LocalQueue) -> None:
    """A handler's first slice is one message; slices double while they stay within the time."""
    put(local_queue, *["h"] * 20)
    pace = local_queue.paces.of(task(1).handler)
    sizes = []
    for _ in range(4):
        ids = take(local_queue)
        sizes.append(len(ids))
        pace.ended_in_time(len(ids), 100)
    assert sizes == [1, 2, 4, 8]


def test_the_pace_of_a_handler() -> None:
    pace = Pace()
    for _ in range(10):
        pace.ended_in_time(pace.limit, 100)
    assert pace.limit == 100
    pace.overran()
    assert pace.limit == 50
    pace.ended_in_time(49, 100)  # a slice that was not full teaches nothing
    assert pace.limit == 50
    pace.conflict()
    assert pace.limit == 1
    pace.ended_in_time(1, 100)
    assert pace.limit == 1
    for _ in range(600):
        pace.ended_in_time(1, 100)
    assert pace.limit > 1
    for _ in range(20):
        pace.overran()
    assert pace.limit == 1


@pytest.mark.parametrize(
    ("seconds", "sizes"), [(0.02, [2, 3, 3]), (0.0001, [8])], ids=["long", "short"]
)
def test_idle_threads_share_messages_that_take_long(
    local_queue: LocalQueue, seconds: float, sizes: list[int]
) -> None:
    """A burst of as many messages as threads must not run one after the other on one of them."""
    pace = local_queue.paces.of(task(1).handler)
    pace.limit, pace.seconds = 100, seconds
    taken: list[int] = []

    def executor() -> None:
        if (slice_ := local_queue.take()) is not None:
            taken.append(len(slice_.tasks))

    threads = [Thread(target=executor, daemon=True) for _ in range(3)]
    for each in threads:
        each.start()
    until(lambda: local_queue.free.count == len(threads), "all threads wait")
    put(local_queue, *["h"] * 8)
    until(lambda: sum(taken) == 8, "all messages are taken")
    local_queue.close()
    for each in threads:
        each.join(60)
    assert sorted(taken) == sizes


def test_an_ordered_queue_is_not_shared(local_queue: LocalQueue) -> None:
    """No other thread could take the rest: smaller slices would only be more transactions."""
    pace = local_queue.paces.of(task(1).handler)
    pace.limit, pace.seconds = 100, 0.02
    tasks = [task(id, line="mail") for id in range(1, 9)]
    for each in tasks:
        each.delivery._row = each.delivery._row._replace(ordered=True)
    local_queue.put(tasks)
    local_queue.free.count = 3
    assert len(take(local_queue)) == 8


def test_a_slice_has_one_kind(local_queue: LocalQueue) -> None:
    """In order; non-atomic handlers alone; batches of a single handler."""
    for name in ("h", "i", "unbound"):
        local_queue.paces.of(task(1, name).handler).limit = 3
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
    local_queue.paces.of(task(1, "h").handler).limit = 5
    local_queue.paces.of(task(1, "i").handler).limit = 2
    put(local_queue, "h", "i", "i", "i", "h")
    assert [take(local_queue), take(local_queue)] == [[1, 2, 3], [4, 5]]


def test_a_full_slice_takes_no_more_of_any_handler(told: Told) -> None:
    small = LocalQueue(batch=1, slice_size=3, poke=told, max_linger=3600.0, slots=Slots(100))
    for name in ("h", "i"):
        small.paces.of(task(1, name).handler).limit = 9
    put(small, "h", "i", "h", "i")
    assert take(small) == [1, 2, 3]


def test_one_that_may_take_long_is_alone_in_its_slice(local_queue: LocalQueue) -> None:
    """PMQ-48: nobody else waits in the transaction of a handler not yet known to be fast."""
    local_queue.paces.of(task(1, "h").handler).limit = 5
    put(local_queue, "h", "i", "h", "h")
    assert [take(local_queue), take(local_queue), take(local_queue)] == [[1], [2], [3, 4]]


def test_executors_without_a_task_are_unused(local_queue: LocalQueue, told: Told) -> None:
    """The loop is poked when another one is: it may claim what it had left for others."""
    assert local_queue.unused() == 0
    threads = [Thread(target=local_queue.take) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: local_queue.free.count == 2)
    assert told.count == 1
    assert local_queue.unused() == 2
    local_queue._waiting.ready.append(task(1))  # an executor has been notified, but has not begun
    assert local_queue.unused() == 1
    local_queue.close()
    for thread in threads:
        thread.join(SOON)


def test_queue_is_stuck_when_no_executor_takes_a_task_for_long(
    local_queue: LocalQueue, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    for module in ("local_queue", "running_tasks"):
        monkeypatch.setattr(f"django_mq.executor.{module}.monotonic", lambda: now[0])
    put(local_queue, "h", "i", "h")
    slice_ = local_queue.take()
    assert slice_ is not None
    assert not local_queue.stuck()
    now[0] += STUCK_AFTER + 0.1
    assert local_queue.stuck()
    assert [each.delivery.id for each in local_queue.take_waiting()] == [2, 3]
    assert local_queue.waiting() == 0
    local_queue.done(slice_)
    before = told.count
    ended = Thread(target=local_queue.take)
    ended.start()  # it finds nothing, and is noted as free
    deadline = time.monotonic() + SOON
    while told.count == before and time.monotonic() < deadline:
        ended.join(0.01)
    assert told.count > before
    local_queue.close()
    ended.join(SOON)
    assert not ended.is_alive()


def test_a_slice_has_no_more_than_a_batch(told: Told) -> None:
    """KAF-3: waiting messages share a slice, up to the limit."""
    local_queue = LocalQueue(batch=3, slice_size=3, poke=told, max_linger=3600.0, slots=Slots(100))
    put(local_queue, *["batch"] * 5)
    assert take(local_queue) == [1, 2, 3]
    assert take(local_queue) == [4, 5]


def test_unstarted_tasks_come_first_again(local_queue: LocalQueue) -> None:
    put(local_queue, "unbound", "unbound", "unbound")
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.put_first(slice_.tasks)
    local_queue.done(slice_)
    assert [take(local_queue) for _ in range(3)] == [[1], [2], [3]]


def test_close_returns_unstarted_tasks_and_ends_the_takers(local_queue: LocalQueue) -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(local_queue.take()), daemon=True)
    thread.start()
    assert local_queue.close() == []
    thread.join(SOON)
    assert got == [None]
    local_queue.put([task(1), task(2, suspect=True)])
    assert local_queue.take() is None
    assert [each.delivery.id for each in local_queue.close()] == [1, 2]


def test_fences_are_held_until_settled(local_queue: LocalQueue, told: Told) -> None:
    tasks = [task(1), task(9)]
    local_queue.unsettled.add(each.delivery for each in tasks)
    local_queue.put(tasks[:1])
    assert [each.fence for each in local_queue.unsettled.all()] == [
        Fence(1, 1, "me:1"),
        Fence(9, 1, "me:1"),
    ]
    assert local_queue.unsettled.has_any("mail")
    assert not local_queue.unsettled.has_any("post")
    assert not local_queue.idle()
    slice_ = local_queue.take()
    assert slice_ is not None
    local_queue.unsettled.remove(each.delivery.fence for each in tasks)
    assert local_queue.unsettled.all() == []
    assert not local_queue.idle()
    before = told.count
    local_queue.done(slice_)
    assert local_queue.idle()
    assert told.count == before + 1


def test_loop_is_poked_when_few_tasks_are_left(local_queue: LocalQueue, told: Told) -> None:
    """NSQ-24: before the local queue is empty, and not once per message."""
    put(local_queue, *["unbound"] * 4)
    local_queue.notify_below(2)
    counts = []
    for _ in range(4):
        take(local_queue)
        counts.append(told.count)
    assert counts == [0, 0, 1, 1]  # once, when it fell below the mark
