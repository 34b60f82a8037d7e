"""Coroutines that were claimed before a slot was free wait in the local queue."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from django_mq import handler
from django_mq.executor import local_queue as local_queue_module
from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Task
from tests.executor.local_queue.conftest import Told, ids, start, task

Build = Callable[[int], LocalQueue]


@pytest.fixture
def with_slots(told: Told) -> Build:
    """Return a local queue with so many slots."""

    def build(count: int) -> LocalQueue:
        return LocalQueue(
            batch=100, slice_size=100, on_room=told, max_linger=3600.0, slots=Slots(count)
        )

    return build


def coroutines(*numbers: int, line: str | None = None) -> list[Task]:
    return [task(number, "coroutine", line=line) for number in numbers]


def end(local_queue: LocalQueue, ended: Task, *, failed: bool = False) -> None:
    """The call has ended; it is not settled."""
    local_queue.slots.end([ended.delivery.fence], failed=failed, seconds=0.001)


def settle(local_queue: LocalQueue, ended: Task) -> None:
    local_queue.slots.settle([ended.delivery.fence])
    local_queue.end_calls(ended.line)


def test_they_start_in_order_as_slots_become_free(with_slots: Build) -> None:
    local_queue = with_slots(2)
    tasks = coroutines(1, 2, 3, 4, 5)
    assert ids(local_queue.put(tasks)) == [1, 2]
    assert local_queue.take_coroutines() == []
    assert local_queue.coroutines() == 3
    end(local_queue, tasks[1])
    assert ids(local_queue.take_coroutines()) == [3]
    assert ids(local_queue.put(coroutines(6))) == []
    for each in tasks[0], tasks[2]:
        end(local_queue, each)
        settle(local_queue, each)
    assert ids(local_queue.take_coroutines()) == [4, 5]
    assert local_queue.coroutines() == 1


def test_the_worker_is_wanted_when_few_wait(with_slots: Build) -> None:
    local_queue = with_slots(4)
    tasks = coroutines(*range(5))
    local_queue.put(tasks)
    assert not local_queue.wants_worker()  # nothing is known of how long calls take
    end(local_queue, tasks[0])
    local_queue.take_coroutines()
    assert local_queue.wants_worker()
    local_queue.put(coroutines(5, 6))
    assert not local_queue.wants_worker()
    end(local_queue, tasks[1])
    local_queue.take_coroutines()
    assert local_queue.wants_worker()  # half of the two are left


def test_one_that_was_taken_over_takes_the_next_slot(with_slots: Build) -> None:
    local_queue = with_slots(1)
    tasks = coroutines(1, 2)
    assert ids(local_queue.put(tasks)) == [1]
    assert local_queue.put_first(coroutines(8, 9)) == []
    order = []
    running = tasks[:1]
    while running:
        [ended] = running
        end(local_queue, ended)
        settle(local_queue, ended)
        running = local_queue.take_coroutines()
        order += ids(running)
    assert order == [8, 9, 2]


def test_nothing_takes_the_slot_of_a_failed_message_before_its_queue_may_back_off(
    with_slots: Build,
) -> None:
    local_queue = with_slots(1)
    [failed, *_] = tasks = coroutines(1, 2, 3)
    local_queue.put(tasks)
    end(local_queue, failed, failed=True)
    assert local_queue.take_coroutines() == []
    local_queue.stop_queue("mail")  # as the record of the failure does, before the slot is freed
    settle(local_queue, failed)
    assert local_queue.take_coroutines() == []
    assert ids(local_queue.take_to_release()) == [2, 3]


def test_a_list_waits_for_the_worker_so_that_more_slots_may_be_free(with_slots: Build) -> None:
    """If each message of a list started as a slot became free, lists would become shorter."""

    async def listed(deliveries: object) -> None: ...

    handler("listed", name="listed", batch=True)(listed)
    local_queue = with_slots(2)
    first = coroutines(1, 2)
    local_queue.put(first)
    local_queue.put([*coroutines(3), task(4, "listed"), task(5, "listed"), *coroutines(6)])
    end(local_queue, first[0])
    end(local_queue, first[1])
    assert ids(local_queue.take_coroutines(lists=False)) == [3]
    assert local_queue.take_coroutines(lists=False) == []
    local_queue.slots.claim_no_more()
    assert local_queue.slots.to_claim(local_queue.coroutines()) == 0
    assert local_queue.wants_worker()
    assert ids(local_queue.take_coroutines()) == [4]


def test_they_are_released_when_they_wait_too_long(
    with_slots: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what waits behind them in their lines; and no more are claimed until a call ends."""
    local_queue = with_slots(2)
    first = coroutines(1, 2)
    local_queue.put(first)
    end(local_queue, first[0])
    assert local_queue.slots.to_claim(0) == 2
    local_queue.put([*coroutines(3, 4), *coroutines(5, 6, line="a"), task(7)])
    assert local_queue.coroutines() == 3
    local_queue.release_overdue()
    assert local_queue.take_to_release() == []
    monkeypatch.setattr(local_queue_module, "STUCK_AFTER", -1.0)
    local_queue.release_overdue()
    assert sorted(ids(local_queue.take_to_release())) == [4, 5, 6]
    assert local_queue.coroutines() == 0
    assert ids(start(local_queue).tasks) == [7]
    assert local_queue.slots.to_claim(0) == 0
    assert ids(local_queue.put(coroutines(8, line="a"))) == []  # its line is free, no slot is
    end(local_queue, first[1])
    assert ids(local_queue.take_coroutines()) == [8]


def test_a_suspect_does_not_hold_them_back(
    with_slots: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run for minutes, and other processes have free slots."""
    local_queue = with_slots(2)
    local_queue.put([task(1, suspect=True)])
    suspect = start(local_queue)
    assert local_queue.put(coroutines(2)) == []
    monkeypatch.setattr(local_queue_module, "STUCK_AFTER", -1.0)
    local_queue.release_overdue()
    assert ids(local_queue.take_to_release()) == [2]
    local_queue.done(suspect)


def test_those_that_cannot_start_free_their_slots(with_slots: Build) -> None:
    """The system refuses the thread of the loop."""
    local_queue = with_slots(2)
    tasks = coroutines(1, line="a") + coroutines(2)
    assert ids(local_queue.put(tasks)) == [1, 2]
    local_queue.put(coroutines(3, line="a"))
    local_queue.cancel_start(tasks)
    assert local_queue.slots.room() == 2
    assert ids(local_queue.take_to_release()) == [3]


def test_the_end_of_a_worker_takes_them_back(with_slots: Build) -> None:
    local_queue = with_slots(1)
    local_queue.put(coroutines(1, 2, 3))
    assert ids(local_queue.close()) == [2, 3]
    assert local_queue.take_coroutines() == []


def test_two_threads_never_start_more_than_there_are_slots(with_slots: Build) -> None:
    """The thread that claims puts new ones; the loop takes those that wait."""
    local_queue = with_slots(3)
    started: list[Task] = []
    lock = threading.Lock()

    def begin(tasks: list[Task]) -> None:
        with lock:
            started.extend(tasks)

    def claim() -> None:
        for number in range(300):
            begin(local_queue.put(coroutines(number)))

    claiming = threading.Thread(target=claim)
    claiming.start()
    ended = 0
    while ended < 300:
        with lock:
            running = started[ended:]
        assert len(running) <= 3
        for each in running:
            end(local_queue, each)
            settle(local_queue, each)
            ended += 1
            begin(local_queue.take_coroutines())
    claiming.join()
    assert sorted(ids(started)) == list(range(300))


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(0.0, 50), (0.001, 50), (0.04, 50), (0.2, 10), (2.0, 1), (2.1, 0)]
)
def test_only_what_starts_soon_is_claimed_ahead(seconds: float, ahead: int) -> None:
    slots = Slots(100)
    assert slots.to_claim(0) == 100
    slots.take(100)
    assert slots.to_claim(0) == 0  # nothing is known yet
    slots.end([(1, 1, "me:1")], failed=True, seconds=seconds)
    assert slots.to_claim(0) == ahead


def test_the_mean_follows_the_calls() -> None:
    slots = Slots(100)
    for _ in range(100):
        slots.take(1)
        slots.end([(1, 1, "me:1")], failed=False, seconds=0.001)
        slots.settle([(1, 1, "me:1")])
    slots.take(100)
    assert slots.to_claim(0) == 50
    for _ in range(8):
        slots.end([(1, 1, "me:1")], failed=True, seconds=10.0)
    assert slots.to_claim(0) == 0


def test_one_slot_claims_nothing_ahead() -> None:
    slots = Slots(1)
    slots.take(1)
    slots.end([(1, 1, "me:1")], failed=True, seconds=0.0)
    assert slots.to_claim(0) == 0
