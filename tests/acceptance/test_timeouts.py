"""Handlers past their time are stopped for real: guarantee 23, NSQ-20."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from django_mq.models import FailedAttempt, QueuedMessage
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker, is_running
from tests.slow import slow


def took(failed: FailedAttempt) -> float:
    """Return the seconds from the start of the attempt to its end."""
    assert failed.started_at is not None
    return (failed.ended_at - failed.started_at).total_seconds()


@pytest.mark.parametrize("kind", ["hang", "spin", *slow("query")])
def test_its_process_is_ended(
    start: Callable[..., Worker], queue: Queue, witness: Witness, kind: str
) -> None:
    """NSQ-20, S18: only it is charged an attempt; its slot is free again, here and in the server.

    `spin` holds the interpreter's lock: no thread of its process runs.
    """
    queue.send("write", *[f"before{n}" for n in range(20)])
    [slow] = queue.send(kind, "slow", until=2)
    queue.send("write", *[f"after{n}" for n in range(20)])
    worker = start()
    queue.wait_empty(worker)
    assert set(queue.done().values()) == {1}
    assert queue.done().total() == 41
    assert {name: attempt for name, attempt, _ in queue.effects() if attempt != 1} == {"slow": 2}
    assert queue.failures(slow) == ["TimedOut"]
    failed = FailedAttempt.objects.get(message_id=slow)
    assert f", in {kind}\n" in failed.traceback  # its place in the code
    assert took(failed) > 0.9  # two clocks
    (_, _, ended), (_, _, again) = witness.started("slow")
    assert not is_running(ended)
    assert is_running(again)
    late = "the handler ran for .+, past its timeout: the option timeout"
    assert re.fullmatch(f"{late}, 1 s", failed.error_text)
    limit = f"{late}, or the setting TIMEOUT"
    assert re.search(f"message {slow}, attempt 1: {limit}: ending process {ended}", worker.said())


def test_a_queue_that_hangs_does_not_keep_others_from_starting(
    start: Callable[..., Worker], queue: Queue
) -> None:
    """Each timeout ends the process: its successor must not always begin with the same queue."""
    queue.send("hang", *[f"slow{n}" for n in range(100)], queue="first", until=3)
    queue.send("write", "quick")  # in the queue `work`, which is behind `first` by name
    worker = start()
    worker.until(lambda: queue.done()["quick"], "the other queue starts")
    assert QueuedMessage.objects.filter(queue="first").exists()


def test_the_process_of_a_hook_that_hangs_is_ended(
    start: Callable[..., Worker], queue: Queue
) -> None:
    """Its message is done, so nothing is charged; the rest of its slice runs elsewhere."""
    queue.send("write", *[f"before{n}" for n in range(20)])
    [slow] = queue.send("hook", "slow")
    queue.send("write", *[f"after{n}" for n in range(20)])
    worker = start()
    worker.until(lambda: f"message {slow}, attempt 1" in worker.said(), "the hook is too late")
    queue.wait_empty(worker)
    assert set(queue.done().values()) == {1}
    assert queue.done().total() == 41
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    assert not FailedAttempt.objects.exists()


def test_neighbours_in_other_threads_are_refunded(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    worker = start("--threads", 2)
    [beside] = queue.send("gate", "beside", gate="open")
    worker.until(witness.started, "one runs")
    [slow] = queue.send("hang", "slow", until=2)
    worker.until(lambda: len(witness.started("beside")) == 2, "the neighbour runs again")
    witness.open("open")
    queue.wait_empty(worker)
    assert [attempt for _, attempt, _ in witness.started("beside")] == [1, 1]
    assert queue.failures(beside) == []
    assert queue.failures(slow) == ["TimedOut"]
    assert queue.done() == {"beside": 1, "slow": 1}


def test_async_handlers_are_cancelled(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Their process and their neighbours continue."""
    worker = start()
    [slow] = queue.send("ahang", "slow", until=2)
    queue.send("acall", "beside", gate="open")
    worker.until(lambda: len(witness.started("slow")) == 2, "it runs again")
    witness.open("open")
    queue.wait_empty(worker)
    assert queue.failures(slow) == ["TimedOut"]
    failed = FailedAttempt.objects.get(message_id=slow)
    assert "await asyncio.sleep(PATIENCE)" in failed.traceback  # the place of its wait
    assert took(failed) > 0.9  # two clocks
    assert len({pid for _, _, pid in witness.started()}) == 1
    assert len(witness.started("beside")) == 1
    assert queue.done() == {"slow": 1, "beside": 1}


@pytest.mark.parametrize("kind", ["ablock", *slow("athread")])
def test_a_call_that_blocks_a_thread_of_async_handlers(
    start: Callable[..., Worker], queue: Queue, witness: Witness, kind: str
) -> None:
    """Guarantee 26: its process is ended; neighbours that had finished are not charged."""
    worker = start()
    [slow] = queue.send(kind, "slow", until=2)
    worker.until(lambda: witness.started("slow"), "it blocks the thread")
    names = [f"m{n}" for n in range(20)]
    brief = queue.send("abrief", *names)
    queue.wait_empty(worker)
    assert queue.failures(slow) == ["TimedOut"]
    assert ", in wait_at\n" in FailedAttempt.objects.get(message_id=slow).traceback
    assert [queue.failures(id) for id in brief] == [[]] * 20
    assert [len(witness.started(name)) for name in names] == [1] * 20
    (_, _, ended), (_, _, again) = witness.started("slow")
    assert not is_running(ended)
    assert is_running(again)
