"""A suspect runs while nothing else of its process runs."""

from __future__ import annotations

import threading

import pytest

from django_mq.executor import local_queue as local_queue_module
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.tasks import Slice
from django_mq.policy import suspect_turns
from tests.executor.local_queue.conftest import Told, dispatch, dispatch_first, take, task
from tests.waiting import SOON, until


def test_a_suspect_runs_alone(local_queue: LocalQueue) -> None:
    dispatch(local_queue, [task(1), task(2, suspect=True), task(3)])
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
    thread.join(SOON)
    assert got[0] is not None
    assert not got[0].alone
    assert not local_queue.exclusive()


def test_suspect_stays_when_others_are_released(local_queue: LocalQueue) -> None:
    """Elsewhere it would begin anew to wait until nothing else runs."""
    suspect, other = task(1, suspect=True), task(2)
    dispatch(local_queue, [suspect, other])
    assert local_queue.take_waiting(suspects=False) == [other]
    assert local_queue.take_waiting() == [suspect]


def test_suspect_waits_until_nothing_runs_and_others_continue(
    local_queue: LocalQueue,
) -> None:
    dispatch(local_queue, [task(9, "coroutine")])
    dispatch(local_queue, [task(1, suspect=True), task(2)])
    slice_ = local_queue.take()
    assert slice_ is not None
    assert [each.delivery.id for each in slice_.tasks] == [2]
    local_queue.done(slice_)
    local_queue.coroutines_done(None)
    assert take(local_queue) == [1]


def test_a_coroutine_that_is_to_start_runs_already_for_a_suspect(local_queue: LocalQueue) -> None:
    """One of the same claim, too: if the suspect kills the process, it must not be charged."""
    coroutine, suspect = task(1, "coroutine"), task(2, suspect=True)
    assert dispatch(local_queue, [coroutine, suspect]) == [coroutine]
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(take(local_queue)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    local_queue.coroutines_done(None)
    thread.join(SOON)
    assert got == [2]


def test_no_coroutine_starts_beside_a_suspect(local_queue: LocalQueue, told: Told) -> None:
    """Its claim was under way when the suspect's turn came."""
    dispatch(local_queue, [task(1, suspect=True)])
    suspect = local_queue.take()
    assert suspect is not None
    assert suspect.alone
    first, second = task(2, "coroutine"), task(3, "coroutine", line="a")
    assert dispatch(local_queue, [first]) == []
    assert dispatch_first(local_queue, [second]) == []
    assert local_queue.coroutines.take() == []
    assert local_queue.coroutines.count() == 2
    before = told.count
    local_queue.done(suspect)
    assert told.count > before
    assert local_queue.coroutines.take() == [second, first]
    assert local_queue.coroutines.count() == 0


def test_a_suspect_that_waited_long_stops_the_others(
    local_queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspect_turns, "SUSPECT_WAIT_SECONDS", -1.0)
    dispatch(local_queue, [task(9, "coroutine")])
    dispatch(local_queue, [task(1, suspect=True), task(2)])
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(take(local_queue)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    local_queue.coroutines_done(None)
    thread.join(SOON)
    assert got == [1]


def test_a_suspect_takes_turns_with_the_others_while_a_long_handler_runs(
    local_queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing would start beside that handler, although the suspect does not run."""
    now = [100.0]
    for module in ("local_queue", "waiting_tasks"):
        monkeypatch.setattr(f"django_mq.executor.{module}.monotonic", lambda: now[0])
    dispatch(local_queue, [task(9, "coroutine")])
    dispatch(local_queue, [task(1, suspect=True), task(2)])
    assert not local_queue.suspect_takes_turns()
    now[0] += 11.0
    assert local_queue.suspect_takes_turns()
    assert local_queue.waits_for_suspect(coroutines=False)
    assert local_queue.exclusive()
    now[0] += 20.0
    assert not local_queue.waits_for_suspect(coroutines=True)
    assert not local_queue.exclusive()
    assert take(local_queue) == [2]
    now[0] += 40.0
    assert local_queue.waits_for_suspect(coroutines=False)
    assert local_queue.exclusive()
    local_queue.coroutines_done(None)
    assert take(local_queue) == [1]


def test_a_suspect_that_could_not_start_is_a_suspect_still(local_queue: LocalQueue) -> None:
    """The database was lost before its slice: it must not run among the others."""
    dispatch(local_queue, [task(1, suspect=True), task(2)])
    slice_ = local_queue.take()
    assert slice_ is not None
    dispatch_first(local_queue, slice_.tasks)
    local_queue.done(slice_)
    again = local_queue.take()
    assert again is not None
    assert again.alone
    assert [each.delivery.id for each in again.tasks] == [1]


def test_suspects_that_come_back_keep_their_order_before_the_others(
    local_queue: LocalQueue,
) -> None:
    dispatch(local_queue, [task(id, suspect=True) for id in (1, 2, 3, 4)])
    first = local_queue.take()
    assert first is not None
    dispatch_first(local_queue, [*first.tasks, task(0, suspect=True)])
    local_queue.done(first)
    assert [take(local_queue) for _ in range(5)] == [[1], [0], [2], [3], [4]]


def test_a_suspect_of_a_line_runs_after_those_that_wait(local_queue: LocalQueue) -> None:
    dispatch(local_queue, [task(1, line="a", suspect=True), task(2, suspect=True)])
    assert take(local_queue) == [2]
    assert take(local_queue) == [1]


def test_a_suspect_that_waits_is_looked_at_each_second(local_queue: LocalQueue) -> None:
    """Nobody says that it has waited for so long that the others must stop."""
    waiting = local_queue._waiting
    assert waiting.wait_timeout() is None
    dispatch(local_queue, [task(1, suspect=True)])
    assert waiting.wait_timeout() == 1.0


def test_async_handlers_may_start_again_after_a_suspect(
    local_queue: LocalQueue, told: Told
) -> None:
    """The fetcher had been told that there was no room."""
    local_queue.unsettled.add([task(5).delivery])
    dispatch(local_queue, [task(1, suspect=True)])
    assert take(local_queue) == [1]
    assert told.count >= 1


def test_a_suspect_that_waits_holds_up_coroutines_first(
    local_queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not claimed from the start of its wait, others may start for ten more seconds."""
    dispatch(local_queue, [task(9, "coroutine")])
    monkeypatch.setattr(local_queue_module, "STUCK_AFTER", -1.0)
    assert not local_queue.waits_for_suspect(coroutines=True)
    dispatch(local_queue, [task(1, suspect=True)])
    assert local_queue.waits_for_suspect(coroutines=True)
    assert not local_queue.waits_for_suspect(coroutines=False)
    monkeypatch.setattr(suspect_turns, "SUSPECT_WAIT_SECONDS", -1.0)
    assert local_queue.waits_for_suspect(coroutines=False)


def test_the_loop_takes_a_suspect_of_an_async_handler(local_queue: LocalQueue, told: Told) -> None:
    """No executor does, and nothing starts beside it until it is settled."""
    suspect, call, coroutine = task(1, "coroutine", suspect=True), task(2), task(3, "coroutine")
    assert dispatch(local_queue, [suspect, call, coroutine]) == [suspect]
    assert local_queue.exclusive()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(take(local_queue)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert got == []
    local_queue.slots.end([suspect.delivery.fence], failed=False, seconds=1.0)
    assert local_queue.coroutines.take() == []
    local_queue.unsettled.add([call.delivery])
    before = told.count
    local_queue.coroutines_done(None)
    assert told.count > before
    thread.join(SOON)
    assert got == [2]
    assert local_queue.coroutines.take() == [coroutine]
    assert not local_queue.exclusive()


@pytest.mark.parametrize("line", [None, "a"])
def test_loop_is_poked_when_a_suspect_may_start(
    local_queue: LocalQueue, told: Told, line: str | None
) -> None:
    """An executor finds it: the last slice has ended, and nothing else runs."""
    suspect = task(2, "coroutine", suspect=True, line=line)
    local_queue.unsettled.add([suspect.delivery])
    local_queue.put([task(1, line=line)])
    running = local_queue.take()
    assert running is not None
    assert dispatch(local_queue, [suspect]) == []
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(take(local_queue)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert local_queue.coroutines.take() == []
    before = told.count
    local_queue.done(running)
    until(lambda: told.count > before)
    assert got == []
    assert local_queue.coroutines.take() == [suspect]
    local_queue.put([task(3, line=line)])
    thread.join(0.05)
    assert got == []
    local_queue.coroutines_done(line and (line,))
    thread.join(SOON)
    assert got == [3]


def test_a_suspect_of_an_async_handler_that_could_not_start(local_queue: LocalQueue) -> None:
    """The system refuses the thread of the loop: the others of its line do not start either."""
    suspect, behind, other = (
        task(1, "coroutine", suspect=True, line="a"),
        task(2, "coroutine", line="a"),
        task(3, "coroutine"),
    )
    local_queue.put([suspect, behind])
    local_queue._waiting.clear_front()
    assert local_queue.coroutines.take() == [suspect]
    local_queue.cancel_start([suspect])
    assert local_queue.take_to_release() == [behind]
    assert dispatch(local_queue, [other]) == [other]
