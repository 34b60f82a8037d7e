"""Limits and backoff over a fleet of processes, some of which are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction

from django_mq import queues
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.store import gates
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker


def seen_in_flight(witness: Witness, since: int = 0) -> list[int]:
    """Return the number of messages in flight that each handler saw at its start."""
    counts = [name for name, _, _ in witness.started() if name.startswith("flying-")]
    return [int(name.partition("-")[2]) for name in counts][since:]


def names(count: int) -> list[str]:
    return [f"m{n}" for n in range(count)]


def nobody_claims(queue: str) -> bool:
    """Return whether the gate is free: later claims then see all earlier decisions."""
    with transaction.atomic(), connection.cursor() as cursor:
        return gates.enter(cursor, queue=queue, limit=None) is not None


def test_a_limit_holds_over_processes_that_are_killed(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """NSQ-23: 4 of many over two workers of two processes each; then 1, then 4 again."""
    witness.open("up")
    queue.send("service", *names(240), pause=0.02)
    mq: dict[str, Any] = {"LEASE": 300, "QUEUES": {"service": {"max_in_flight": 4}}}
    workers = [start("--processes", 2, "--threads", 3, mq=mq) for _ in range(2)]
    dice = random.Random(3)
    for wanted in (30, 70):
        workers[0].until(lambda wanted=wanted: queue.done().total() >= wanted, f"{wanted} done")
        worker = dice.choice(workers)
        os.kill(dice.choice(worker.until(worker.alive, "a child")), signal.SIGKILL)
    assert max(seen_in_flight(witness)) == 4

    queues.limit("service", 1)
    workers[0].until(lambda: nobody_claims("service"), "no claim on the old limit is under way")
    workers[0].until(lambda: queue.leased() <= 1, "the lower limit holds")
    # The remaining one may have counted already, but not written its count yet.
    since = len(seen_in_flight(witness)) + 1
    workers[0].until(lambda: len(seen_in_flight(witness)) > since + 15, "it goes on one by one")
    assert set(seen_in_flight(witness, since)) == {1}

    queues.limit("service", None)
    queue.wait_empty(workers[0], 90)
    assert max(seen_in_flight(witness)) == 4
    assert set(queue.done().values()) == {1}
    assert len(queue.done()) == 240


def test_a_probe_whose_process_is_killed_is_not_kept(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """NSQ-5, NSQ-7, NSQ-8: 64 messages of a broken service burn few attempts; one probes."""
    # Few probes fail, however long it takes to see that it backs off.
    backoff = {"multiplier": 0.25, "maximum": 60, "jitter": 0.1}
    mq: dict[str, Any] = {"LEASE": 300, "QUEUES": {"service": {"backoff": backoff}}}
    worker = start("--processes", 3, "--threads", 2, mq=mq)
    worker.has_started(3)
    witness.open("go")
    queue.send("service", *names(64), gate="go")

    def state() -> QueueState | None:
        return QueueState.objects.filter(queue="service", backoff_level__gt=0).first()

    def started() -> int:
        return sum(name.startswith("m") for name, _, _ in witness.started())

    worker.until(lambda: (found := state()) and found.backoff_level >= 2, "it backs off")
    (witness.directory / "go.gate").unlink()
    failed = FailedAttempt.objects.count()
    worker.until(lambda: started() == FailedAttempt.objects.count() + 1, "one waits at the gate")
    found = state()
    assert found is not None
    assert queue.leased() == 1
    probe, starts = found.probe_by, len(witness.started())
    pid = witness.started()[-1][2]
    os.kill(pid, signal.SIGKILL)
    worker.until(lambda: len(witness.started()) > starts, "another probes, long before the lease")
    found = state()
    assert found is not None
    assert found.probe_by not in (None, probe)
    assert queue.leased() == 1
    assert FailedAttempt.objects.filter(error_class__endswith="WorkerLost").count() == 1
    # The running ones of each process, then the probes: not each of the 64 in turn.
    assert failed <= 6 + 4
    assert max(QueuedMessage.objects.values_list("attempts", flat=True)) <= 6

    witness.open("up")
    witness.open("go")
    queue.wait_empty(worker)
    assert set(queue.done().values()) == {1}
    assert len(queue.done()) == 64
    assert QueueState.objects.get(queue="service").backoff_level == 0
    assert worker.said().count("no longer backs off") == 1
