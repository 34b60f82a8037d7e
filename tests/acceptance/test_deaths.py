"""However a process dies, only its running message is charged, and the other messages continue."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from django.db.models.functions import Now

from django_mq import RetryPolicy, fixed
from django_mq.models import QueuedMessage
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.slow import slow

#: The promise is 2 s (guarantee 26); the lease is 300 s here. This machine may be busy.
DELAY = 20.0
LATER = RetryPolicy(max_attempts=3, backoff=fixed(3600))
BEFORE, AFTER = [[f"{side}{n}" for n in range(20)] for side in ("before", "after")]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("segv", "was killed by SIGSEGV"),
        (3, "exited with code 3"),
        *slow(("abort", "was killed by SIGABRT"), ("kill", "was killed by SIGKILL")),
    ],
)
def test_a_message_that_ends_its_process(
    start: Callable[..., Worker], queue: Queue, witness: Witness, how: str | int, said: str
) -> None:
    """Guarantees 3, 26: it is charged and a suspect; the others are done soon, uncharged."""
    queue.send("write", *BEFORE)
    [poison] = queue.send("die", "poison", how=how, until=2, retry=LATER)
    queue.send("write", *AFTER)
    worker = start("--processes", 1)
    worker.until(lambda: witness.started("poison"), "it starts")
    began = time.monotonic()
    worker.until(lambda: queue.done().total() == len(BEFORE + AFTER), "the others are done")
    assert time.monotonic() - began < DELAY
    worker.until(lambda: queue.failures(poison), "the attempt is charged", DELAY)
    row = queue.message(poison)
    assert (row.attempts, row.suspect, row.leased_until) == (1, True, None)
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    worker.says(rf"{said} while it ran message {poison};")

    QueuedMessage.objects.update(processable_after=Now())

    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys([*BEFORE, "poison", *AFTER], 1)
    assert queue.failures(poison) == ["WorkerLost"]


@pytest.mark.parametrize("error", ["MemoryError", *slow("RecursionError")])
def test_a_message_that_exhausts_python(
    start: Callable[..., Worker], queue: Queue, witness: Witness, error: str
) -> None:
    """It failed like any other attempt: its writes are undone, and its process continues."""
    [greedy] = queue.send("exhaust", "greedy", how=error, until=3)
    queue.send("write", *AFTER)
    worker = start("--processes", 1)
    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys(["greedy", *AFTER], 1)
    assert [attempt for _, attempt, _ in witness.started("greedy")] == [1, 2, 3]
    assert queue.failures(greedy) == [error] * 2
    assert len(worker.children()) == 1
