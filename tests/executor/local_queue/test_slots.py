"""Coroutines that were claimed before a slot was free wait in the local queue."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from django_mq import handler
from django_mq.executor import waiting_coroutines
from django_mq.executor.async_slots import Slots
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Task
from tests.executor.local_queue.conftest import Told, dispatch, dispatch_first, ids, start, task

Build = Callable[[int], LocalQueue]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def with_slots(told: Told) -> Build:
    """Build a local queue with a given number of slots."""

    def build(count: int) -> LocalQueue:
        return LocalQueue(
            batch=100,
            slice_size=100,
            poke=told,
            max_linger=3600.0,
            slots=Slots(count, clock=Clock()),
        )

    return build


def coroutines(*numbers: int, line: str | None = None) -> list[Task]:
    return [task(number, "coroutine", line=line) for number in numbers]


def end(local_queue: LocalQueue, ended: Task, *, failed: bool = False) -> None:
    """The call has ended; it is not settled."""
    local_queue.slots.end([ended.delivery.fence], failed=failed, seconds=0.001)


def settle(local_queue: LocalQueue, ended: Task) -> None:
    local_queue.slots.settle([ended.delivery.fence])
    local_queue.coroutines_done(ended.line)


def test_they_start_in_order_as_slots_become_free(with_slots: Build) -> None:
    local_queue = with_slots(2)
    tasks = coroutines(1, 2, 3, 4, 5)
    assert ids(dispatch(local_queue, tasks)) == [1, 2]
    assert local_queue.coroutines.take() == []
    assert local_queue.coroutines.count() == 3
    end(local_queue, tasks[1])
    assert ids(local_queue.coroutines.take()) == [3]
    assert ids(dispatch(local_queue, coroutines(6))) == []
    for each in tasks[0], tasks[2]:
        end(local_queue, each)
        settle(local_queue, each)
    assert ids(local_queue.coroutines.take()) == [4, 5]
    assert local_queue.coroutines.count() == 1


def test_the_worker_is_wanted_when_few_wait(with_slots: Build) -> None:
    local_queue = with_slots(4)
    tasks = coroutines(*range(5))
    dispatch(local_queue, tasks)
    assert not local_queue.coroutines.want_poke()  # nothing is known of how long calls take
    end(local_queue, tasks[0])
    local_queue.coroutines.take()
    assert not local_queue.coroutines.want_poke()
    run_all(local_queue.slots, 10, 0.001)
    assert local_queue.coroutines.want_poke()
    dispatch(local_queue, coroutines(5, 6))
    assert not local_queue.coroutines.want_poke()
    end(local_queue, tasks[1])
    local_queue.coroutines.take()
    assert local_queue.coroutines.want_poke()  # half of the two are left


def test_one_that_was_taken_over_takes_the_next_slot(with_slots: Build) -> None:
    local_queue = with_slots(1)
    tasks = coroutines(1, 2)
    assert ids(dispatch(local_queue, tasks)) == [1]
    assert dispatch_first(local_queue, coroutines(8, 9)) == []
    order = []
    running = tasks[:1]
    while running:
        [ended] = running
        end(local_queue, ended)
        settle(local_queue, ended)
        running = local_queue.coroutines.take()
        order += ids(running)
    assert order == [8, 9, 2]


def test_nothing_takes_the_slot_of_a_failed_message_before_its_queue_may_back_off(
    with_slots: Build,
) -> None:
    local_queue = with_slots(1)
    [failed, *_] = tasks = coroutines(1, 2, 3)
    dispatch(local_queue, tasks)
    end(local_queue, failed, failed=True)
    assert local_queue.coroutines.take() == []
    local_queue.stop_queue("mail")  # as the record of the failure does, before the slot is freed
    settle(local_queue, failed)
    assert local_queue.coroutines.take() == []
    assert ids(local_queue.take_to_release()) == [2, 3]


def test_a_list_waits_for_the_worker_so_that_more_slots_may_be_free(with_slots: Build) -> None:
    """If each message of a list started as a slot became free, lists would become shorter."""

    async def listed(deliveries: object) -> None: ...

    handler("listed", name="listed", batch=True)(listed)
    local_queue = with_slots(2)
    first = coroutines(1, 2)
    dispatch(local_queue, first)
    dispatch(local_queue, [*coroutines(3), task(4, "listed"), task(5, "listed"), *coroutines(6)])
    end(local_queue, first[0])
    end(local_queue, first[1])
    assert ids(local_queue.coroutines.take(lists=False)) == [3]
    assert local_queue.coroutines.take(lists=False) == []
    assert local_queue.slots.to_claim(local_queue.coroutines.count()) == 0
    assert local_queue.coroutines.want_poke()
    assert ids(local_queue.coroutines.take()) == [4]


def test_they_are_released_when_they_wait_too_long(
    with_slots: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what waits behind them in their lines."""
    local_queue = with_slots(2)
    first = coroutines(1, 2)
    dispatch(local_queue, first)
    end(local_queue, first[0])
    dispatch(local_queue, [*coroutines(3, 4), *coroutines(5, 6, line="a"), task(7)])
    assert local_queue.coroutines.count() == 3
    local_queue.coroutines.release(overdue=True)
    assert local_queue.take_to_release() == []
    monkeypatch.setattr(waiting_coroutines, "SLOT_WAIT_SECONDS", -1.0)
    local_queue.coroutines.release(overdue=True)
    assert sorted(ids(local_queue.take_to_release())) == [4, 5, 6]
    assert local_queue.coroutines.count() == 0
    assert ids(start(local_queue).tasks) == [7]
    assert ids(dispatch(local_queue, coroutines(8, line="a"))) == []  # its line is free, no slot is
    end(local_queue, first[1])
    assert ids(local_queue.coroutines.take()) == [8]


def test_taken_over_coroutines_do_not_postpone_the_release_of_others(
    with_slots: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_queue = with_slots(1)
    dispatch(local_queue, coroutines(1, 2))
    before = local_queue._waiting.ordering.slot_wanted_since()
    dispatch_first(local_queue, coroutines(3))
    assert local_queue._waiting.ordering.slot_wanted_since() == before
    assert 0.0 < local_queue.coroutines.overdue_in() <= waiting_coroutines.SLOT_WAIT_SECONDS
    monkeypatch.setattr(waiting_coroutines, "SLOT_WAIT_SECONDS", -1.0)
    assert local_queue.coroutines.overdue_in() == 0.0
    local_queue.coroutines.release(overdue=True)
    assert local_queue.coroutines.overdue_in() == float("inf")


def test_an_executor_that_puts_tasks_back_starts_none_of_them(with_slots: Build) -> None:
    """Only the worker does: an executor would drop them."""
    local_queue = with_slots(1)
    [first, *_] = tasks = coroutines(1, 2)
    dispatch(local_queue, tasks)
    end(local_queue, first)
    settle(local_queue, first)
    local_queue.put([task(8)])
    local_queue.put_first([task(9)])
    assert local_queue.slots.room() == 1
    assert ids(local_queue.coroutines.take()) == [2]


def test_a_suspect_does_not_hold_them_back(
    with_slots: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run for minutes, and other processes have free slots."""
    local_queue = with_slots(2)
    dispatch(local_queue, [task(1, suspect=True)])
    suspect = start(local_queue)
    assert dispatch(local_queue, coroutines(2)) == []
    monkeypatch.setattr(waiting_coroutines, "SLOT_WAIT_SECONDS", -1.0)
    local_queue.coroutines.release(overdue=True)
    assert ids(local_queue.take_to_release()) == [2]
    local_queue.done(suspect)


def test_coroutines_that_cannot_start_free_their_slots(with_slots: Build) -> None:
    """The system refuses the thread of the loop."""
    local_queue = with_slots(2)
    tasks = coroutines(1, line="a") + coroutines(2)
    assert ids(dispatch(local_queue, tasks)) == [1, 2]
    dispatch(local_queue, coroutines(3, line="a"))
    local_queue.cancel_start(tasks)
    assert local_queue.slots.room() == 2
    assert ids(local_queue.take_to_release()) == [3]


def test_the_end_of_a_worker_takes_them_back(with_slots: Build) -> None:
    local_queue = with_slots(1)
    dispatch(local_queue, coroutines(1, 2, 3))
    assert ids(local_queue.close()) == [2, 3]
    assert local_queue.coroutines.take() == []


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
            begin(dispatch(local_queue, coroutines(number)))

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
            begin(local_queue.coroutines.take())
    claiming.join()
    assert sorted(ids(started)) == list(range(300))


def run_all(slots: Slots, count: int, seconds: float) -> None:
    """Let `count` calls end, each after `seconds`, and be settled."""
    for _ in range(count):
        slots.take(1)
        slots.end([(1, 1, "me:1")], failed=False, seconds=seconds)
        slots.settle([(1, 1, "me:1")])


@pytest.mark.parametrize(
    ("count", "seconds", "ahead"),
    [(0, 0.0, 0), (4, 0.0, 0), (5, 0.0, 1), (100, 0.1, 20), (1_000, 0.01, 50), (1_000, 0.11, 0)],
)
def test_only_tasks_that_start_soon_are_claimed_ahead(
    count: int, seconds: float, ahead: int
) -> None:
    """As many as ended in the last 20 ms, on average; at most half of the slots."""
    clock = Clock()
    slots = Slots(100, clock=clock)
    run_all(slots, 50, seconds)
    clock.now = 1.0
    run_all(slots, count, seconds)
    assert slots.to_claim(0) == 100 + ahead
    slots.take(100)
    assert slots.to_claim(0) == ahead
    clock.now += 0.11
    assert slots.to_claim(0) == 0  # nothing ended lately


def test_one_that_turns_while_others_hold_their_slots_claims_nothing_ahead() -> None:
    """By the mean alone, it would let messages wait that another process could run."""
    clock = Clock()
    slots = Slots(100, clock=clock)
    slots.take(99)
    for _ in range(20):
        run_all(slots, 1, 0.05)
        clock.now += 0.05
    assert slots.to_claim(0) == 1
    assert slots.to_claim(1) == 0


def test_the_mean_follows_the_calls() -> None:
    slots = Slots(100, clock=Clock())
    run_all(slots, 100, 0.001)
    assert slots.to_claim(0) == 120
    run_all(slots, 2, 10.0)
    assert slots.to_claim(0) == 100


def test_a_few_slots_claim_nothing_ahead() -> None:
    slots = Slots(1, clock=Clock())
    run_all(slots, 100, 0.001)
    slots.take(1)
    assert slots.to_claim(0) == 0


def test_queue_without_claims_ahead_gets_its_turn() -> None:
    """Otherwise a slot would never be free when its queue is asked for."""
    slots = Slots(100, clock=Clock())
    run_all(slots, 100, 0.001)
    assert slots.to_claim(0, ahead=False) == 100
    slots.take(100)
    assert slots.to_claim(0, ahead=False) == 0
    assert slots.to_claim(10) == slots.to_claim(10, ahead=False) == 10


def test_slots_are_stuck_until_a_call_ends_whoever_looks() -> None:
    clock = Clock()
    local_queue = LocalQueue(
        batch=100,
        slice_size=100,
        poke=lambda: None,
        max_linger=3600.0,
        slots=Slots(1, clock=clock),
    )
    [first, *others] = coroutines(1, 2)
    dispatch(local_queue, [first])
    clock.now = 5.0
    dispatch(local_queue, others)
    assert local_queue.slots.full_for() == 5.0
    end(local_queue, first)
    assert local_queue.slots.full_for() == 0.0
