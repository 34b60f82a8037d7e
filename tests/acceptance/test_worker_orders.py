"""Operators tell worker processes to be quiet, to resume, and to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from django_mq import queues
from django_mq.models import FailedAttempt
from django_mq.queues import WorkerProcess
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import HURRIED, Queue
from tests.acceptance.processes import Worker


def fleet(worker: Worker, count: int) -> list[WorkerProcess]:
    """Return `count` processes in order, once all are alive and have written a heartbeat."""
    pids = worker.has_started(count)[-count:]
    worker.until(lambda: {each.pid for each in queues.workers()} >= set(pids), "heartbeats")
    return sorted(
        (each for each in queues.workers() if each.pid in pids), key=lambda each: each.pid
    )


def is_quiet(pid: int | None = None) -> bool:
    return any(each.quiet for each in queues.workers() if pid in (None, each.pid))


@pytest.mark.parametrize(
    "mq",
    [
        pytest.param({}, id="notify"),
        pytest.param({"WAKEUP": "poll"}, id="poll", marks=pytest.mark.thorough),
    ],
)
def test_quiet_worker_finishes_running_messages_and_claims_none(
    start: Callable[..., Worker], queue: Queue, witness: Witness, mq: dict[str, Any]
) -> None:
    worker = start(mq=mq, **HURRIED)
    queue.send("gate", "runs", gate="open")
    queue.send("write", "a", "b", "c")
    worker.until(lambda: witness.started("runs") and queue.leased() > 1, "one runs, others wait")
    [process] = fleet(worker, 1)

    assert queues.quiet_workers(process.id, by="ana") == (process.id,)
    worker.says(r"is quiet: .*by order of ana")
    worker.until(lambda: queue.leased() == 1, "what did not start is released")
    worker.until(is_quiet, "its heartbeat says so")
    [order] = queues.worker_orders(process.id)
    assert (order.action, order.asked_by, order.taken_at is not None) == ("quiet", "ana", True)
    queue.send("write", "later")
    witness.open("open")
    worker.until(lambda: queue.done() == {"runs": 1}, "what runs ends")
    before = queues.workers()[0].last_seen
    worker.until(lambda: queues.workers()[0].last_seen > before, "it is alive")
    assert {row.attempts for row in queue.left()} == {0}
    assert not queue.leased()
    assert "quiet" in str(queues.why(queue.left()[0].pk))

    queues.resume_workers([process.id])
    queue.wait_empty(worker)
    worker.until(lambda: not is_quiet(), "its heartbeat says so")
    assert worker.children() == [process.pid]


def test_stopped_process_is_not_replaced_and_siblings_continue(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    worker = start("--processes", 2)
    first, second = fleet(worker, 2)
    assert queues.stop_workers(first.id) == (first.id,)
    worker.until(lambda: worker.alive() == [second.pid], "one ends")
    worker.until(lambda: [each.pid for each in queues.workers()] == [second.pid], "it has left")
    queue.send("write", "a")
    queue.wait_empty(worker)
    assert len(worker.children()) == 2
    assert queues.stop_workers([first.id, second.id]) == (second.id,)
    assert worker.ends() == 0
    assert len(worker.children()) == 2


def test_a_stopped_process_that_dies_in_its_drain_is_not_replaced(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    worker = start("--processes", 2)
    queue.send("gate", "runs", gate="gate{attempt}")
    worker.until(lambda: witness.started("runs"), "it runs")
    first, second = fleet(worker, 2)
    [(_, _, pid)] = witness.started("runs")
    running, other = (first, second) if first.pid == pid else (second, first)
    queues.stop_workers(running.id, by="ana")
    worker.says(r"drains and leaves, by order of ana")
    worker.kill_child(worker.children().index(pid), signal.SIGKILL)
    worker.says("was killed by SIGKILL")
    witness.open("gate2")
    queue.wait_empty(worker)
    assert FailedAttempt.objects.count() == 1
    assert worker.children() == [pid for pid in worker.children() if pid in (first.pid, second.pid)]
    assert worker.alive() == [other.pid]


def test_replacement_of_a_quiet_process_is_quiet(
    start: Callable[..., Worker], queue: Queue
) -> None:
    worker = start()
    [process] = fleet(worker, 1)
    queues.quiet_workers(process.id)
    worker.says("is quiet")
    worker.kill_child(0)
    [following] = fleet(worker, 1) if worker.has_started(2) else []
    worker.until(lambda: is_quiet(following.pid), "the next one is quiet")
    queue.send("write", "a")
    queues.resume_workers(following.id)
    queue.wait_empty(worker)
