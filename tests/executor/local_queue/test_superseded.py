"""A message is claimed again here while an earlier claim of it still waits or runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Task
from tests.executor.local_queue.conftest import dispatch, dispatch_first, ids, start, task

Add = Callable[[LocalQueue, list[Task]], list[Task]]

ADDERS = pytest.mark.parametrize("add", [dispatch, dispatch_first])
LINES = pytest.mark.parametrize("line", [None, "a"])


def claims(tasks: list[Task]) -> set[str]:
    return {each.delivery.fence.claimed_by for each in tasks}


def claim(local_queue: LocalQueue, number: int, name: str, line: str | None) -> list[Task]:
    tasks = [task(id, name, line=line, claim=number) for id in (1, 2)]
    local_queue.unsettled.add(each.delivery for each in tasks)
    return tasks


@ADDERS
@LINES
@pytest.mark.parametrize("name", ["h", "unbound", "batch"])
def test_the_earlier_claim_is_released(
    local_queue: LocalQueue, name: str, line: str | None, add: Add
) -> None:
    dispatch(local_queue, claim(local_queue, 1, name, line))
    add(local_queue, claim(local_queue, 2, name, line))
    assert claims(local_queue.take_to_release()) == {"me:1"}
    assert claims(start(local_queue).tasks) == {"me:2"}


@ADDERS
def test_a_claim_that_comes_back_from_a_slice_is_released(
    local_queue: LocalQueue, add: Add
) -> None:
    dispatch(local_queue, claim(local_queue, 1, "h", None))
    slice_ = start(local_queue)
    dispatch(local_queue, claim(local_queue, 2, "h", None))
    add(local_queue, slice_.tasks)
    local_queue.done(slice_)
    assert claims(local_queue.take_to_release()) == {"me:1"}
    assert claims(start(local_queue).tasks) == {"me:2"}


def test_a_coroutine_that_waits_for_a_slot_is_released(local_queue: LocalQueue) -> None:
    local_queue.slots.take(100)
    dispatch(local_queue, claim(local_queue, 1, "coroutine", None))
    local_queue.slots.give_back(100)
    assert claims(dispatch(local_queue, claim(local_queue, 2, "coroutine", None))) == {"me:2"}
    assert claims(local_queue.take_to_release()) == {"me:1"}


def queue_up(local_queue: LocalQueue, *tasks: Task) -> list[Task]:
    """Claim `tasks`; coroutines wait for a slot until `give_back(100)`."""
    local_queue.unsettled.add(each.delivery for each in tasks)
    local_queue.slots.take(100)
    assert not dispatch(local_queue, tasks)
    return list(tasks)


@ADDERS
@pytest.mark.parametrize("name", ["h", "coroutine"])
def test_later_tasks_of_its_line_are_released_too(
    local_queue: LocalQueue, name: str, add: Add
) -> None:
    """Its own lease may be good: it would start before the later claim."""
    earlier = queue_up(local_queue, task(1, name, line="a"), task(2, name, line="a"))
    elsewhere = queue_up(local_queue, task(3, name, line="b"))
    later = task(1, name, line="a", claim=2)
    local_queue.unsettled.add([later.delivery])
    add(local_queue, [later])
    assert sorted(ids(local_queue.take_to_release())) == ids(earlier)
    local_queue.slots.give_back(200)
    started = local_queue.coroutines.take()
    while len(started) < 2:
        started += start(local_queue).tasks  # of a handler that has not run yet, one at a time
    assert all(each in started for each in (later, *elsewhere))


def test_earlier_tasks_of_its_line_start_before_the_later_claim(
    local_queue: LocalQueue,
) -> None:
    """A failover lost only the last of the claims."""
    first, _ = queue_up(local_queue, task(1, "coroutine", line="a"), task(2, "coroutine", line="a"))
    later = task(2, "coroutine", line="a", claim=2)
    local_queue.unsettled.add([later.delivery])
    dispatch(local_queue, [later])
    assert ids(local_queue.take_to_release()) == [2]
    local_queue.slots.give_back(100)
    assert local_queue.coroutines.take() == [first]
    local_queue.coroutines_done(first.line)
    assert local_queue.coroutines.take() == [later]


@ADDERS
@LINES
def test_a_suspect_that_waits_to_run_alone_is_released(
    local_queue: LocalQueue, line: str | None, add: Add
) -> None:
    """One of a line waits among the suspects once its turn has come."""
    dispatch(local_queue, [task(8)])
    running = [start(local_queue)]
    earlier = task(1, suspect=True, line=line)
    local_queue.unsettled.add([earlier.delivery])
    dispatch(local_queue, [earlier, task(9)])
    running.append(start(local_queue))
    assert local_queue.exclusive()
    later = task(1, suspect=True, line=line, claim=2)
    local_queue.unsettled.add([later.delivery])
    add(local_queue, [later])
    assert local_queue.take_to_release() == [earlier]
    for slice_ in running:
        local_queue.done(slice_)
    assert start(local_queue).tasks == [later]


def test_a_settled_claim_is_forgotten(local_queue: LocalQueue) -> None:
    earlier = claim(local_queue, 1, "h", None)
    claim(local_queue, 2, "h", None)
    assert local_queue.unsettled.superseded == {each.delivery.fence for each in earlier}
    local_queue.unsettled.remove(each.delivery.fence for each in earlier)
    assert not local_queue.unsettled.superseded
    assert {each.fence.claimed_by for each in local_queue.unsettled.all()} == {"me:2"}
