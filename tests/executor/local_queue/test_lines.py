"""Lines in the local queue: one slice of each line is out at a time."""

from __future__ import annotations

import pytest

from django_mq.executor.local_queue import LocalQueue
from tests.executor.local_queue.conftest import (
    Told,
    dispatch,
    dispatch_first,
    ids,
    lined,
    start,
    take,
    task,
)


def test_of_a_line_one_slice_is_out_at_a_time(local_queue: LocalQueue) -> None:
    """KAF-2: followers wait, and other lines continue."""
    dispatch(local_queue, lined("a", "a", "b", "a", "-"))
    first = start(local_queue)
    second, third = start(local_queue), start(local_queue)
    assert [ids(each.tasks) for each in (first, second, third)] == [[1], [3], [5]]
    assert local_queue.waiting() == 2
    local_queue.done(second)
    local_queue.done(first)
    assert [take(local_queue), take(local_queue)] == [[2], [4]]


def test_the_next_of_a_free_line_comes_before_the_rest(local_queue: LocalQueue) -> None:
    dispatch(local_queue, lined("a", "a", "-", "-", "a"))
    first = start(local_queue)
    second = start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    local_queue.done(first)
    assert [take(local_queue), take(local_queue), take(local_queue)] == [[2], [4], [5]]


def test_several_of_a_line_share_a_slice(local_queue: LocalQueue) -> None:
    """In order; and two slices never share a line."""
    local_queue.paces.of(task(1).handler).limit = 3
    dispatch(local_queue, lined("a", "b", "a", "a", "c", "b", "c"))
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1, 2, 3], [5, 7]]
    local_queue.done(first)
    local_queue.done(second)
    assert sorted(take(local_queue)) == [4, 6]


@pytest.mark.parametrize("name", ["unbound", "batch"])
def test_lines_of_other_kinds(local_queue: LocalQueue, name: str) -> None:
    dispatch(local_queue, lined("a", "a", "b", handler=name))
    first, second = start(local_queue), start(local_queue) if name == "unbound" else None
    if second is None:
        assert ids(first.tasks) == [1, 2, 3]
        return
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]


def test_unstarted_tasks_go_before_those_that_wait_for_their_line(local_queue: LocalQueue) -> None:
    local_queue.paces.of(task(1).handler).limit = 3
    tasks = lined("a", "a", "a", "a", "-")
    dispatch(local_queue, tasks)
    first = start(local_queue)
    assert ids(first.tasks) == [1, 2, 3]
    second = start(local_queue)
    assert ids(second.tasks) == [5]
    dispatch_first(local_queue, tasks[1:3])
    assert local_queue.waiting() == 3
    local_queue.done(first)
    assert take(local_queue) == [2, 3, 4]


def test_a_line_that_was_put_back_comes_behind_the_others_in_its_order(
    local_queue: LocalQueue,
) -> None:
    """Its first message could not start: another session has the row."""
    dispatch(local_queue, lined("a", "a", "-", "a", "-"))
    first = start(local_queue)
    assert ids(first.tasks) == [1]
    assert take(local_queue) == [3]  # 2 waits for its line now, 4 is still in the queue
    first.put_back = True
    dispatch_first(local_queue, first.tasks)
    local_queue.done(first)
    assert [take(local_queue) for _ in range(4)] == [[5], [1], [2], [4]]


def test_halted_line_is_released(local_queue: LocalQueue, told: Told) -> None:
    """PMQ-43: messages behind a failed one do not start, wherever they wait."""
    local_queue.paces.of(task(1).handler).limit = 2
    tasks = lined("a", "a", "a", "b", "a")
    dispatch(local_queue, tasks)
    first = start(local_queue)
    assert ids(first.tasks) == [1, 2]
    second = start(local_queue)
    assert ids(second.tasks) == [4]
    local_queue.halt_line(("a",))
    assert told.count >= 1
    assert local_queue.is_unwanted(tasks[1])
    assert not local_queue.is_unwanted(tasks[3])
    dispatch_first(local_queue, tasks[1:2])
    assert sorted(ids(local_queue.take_to_release())) == [2, 3, 5]
    assert local_queue.take_to_release() == []
    assert local_queue.waiting() == 0
    local_queue.done(first)
    assert not local_queue.is_unwanted(tasks[1])
    dispatch(local_queue, [task(6, line="a", claim=2)])
    assert take(local_queue) == [6]


def test_a_line_of_which_nothing_is_out_is_not_halted_for_good(local_queue: LocalQueue) -> None:
    """A lease lost long ago says nothing about the next claim."""
    dispatch(local_queue, lined("a"))
    local_queue.halt_line(("a",))
    assert ids(local_queue.take_to_release()) == [1]
    dispatch(local_queue, [task(2, line="a")])
    assert take(local_queue) == [2]


def test_a_suspect_waits_for_its_turn_in_its_line(local_queue: LocalQueue) -> None:
    """It runs alone, after the messages before it and before those behind it."""
    dispatch(
        local_queue,
        [task(1, line="a"), task(2, line="a", suspect=True), task(3, line="a"), task(4)],
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


def test_a_suspect_shares_no_slice_with_those_before_it_in_its_line(
    local_queue: LocalQueue,
) -> None:
    local_queue.paces.of(task(1).handler).limit = 9
    dispatch(local_queue, [task(1, line="a"), task(2, line="a", suspect=True), task(3, line="a")])
    assert take(local_queue) == [1]
    assert take(local_queue) == [2]


def test_a_suspect_that_could_not_start_goes_first_in_its_line_again(
    local_queue: LocalQueue,
) -> None:
    dispatch(local_queue, [task(1, line="a", suspect=True), task(2, line="a")])
    suspect = start(local_queue)
    dispatch_first(local_queue, suspect.tasks)
    local_queue.done(suspect)
    again = start(local_queue)
    assert again.alone
    assert ids(again.tasks) == [1]
    local_queue.done(again)
    assert take(local_queue) == [2]


def test_released_tasks_free_their_lines(local_queue: LocalQueue) -> None:
    """Whatever a task waits for: its line, its turn to be alone, a slot."""
    dispatch(
        local_queue, [*lined("a", "a", "-"), task(4, line="s", suspect=True), task(5, line="s")]
    )
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    coroutines = [task(n, "coroutine", line="c") for n in (6, 7, 8)]
    assert ids(dispatch(local_queue, coroutines)) == [6]
    local_queue.coroutines_done(("c",))
    assert sorted(ids(local_queue.take_waiting())) == [2, 4, 5, 7, 8]
    assert local_queue.waiting() == 0
    assert local_queue.coroutines.take() == []
    local_queue.done(first)
    local_queue.done(second)
    dispatch(
        local_queue, [task(n, line=line, claim=2) for n, line in ((2, "a"), (4, "s"), (7, "c"))]
    )
    assert [take(local_queue) for _ in range(3)] == [[2], [4], [7]]


def test_stopped_queue_releases_tasks_that_wait_for_their_line(local_queue: LocalQueue) -> None:
    dispatch(local_queue, lined("a", "a", "b"))
    first, second = start(local_queue), start(local_queue)
    assert [ids(first.tasks), ids(second.tasks)] == [[1], [3]]
    local_queue.stop_queue("mail")
    assert ids(local_queue.take_to_release()) == [2]
    local_queue.done(first)
    dispatch(local_queue, [task(4, line="a")])
    assert ids(local_queue.take_to_release()) == [4]


def test_dropped_suspect_frees_the_tasks_behind_it(local_queue: LocalQueue) -> None:
    """Only unwanted tasks are dropped: the others of the line are not forgotten."""
    dispatch(local_queue, [task(9, "coroutine")])
    dispatch(local_queue, [task(1, line="a", suspect=True), task(2, line="a", claim=2), task(3)])
    slice_ = start(local_queue)
    assert ids(slice_.tasks) == [3]
    local_queue.drop(["mail"], keeping=["me:2"])
    assert ids(local_queue.take_to_release()) == [1]
    assert take(local_queue) == [2]
