"""Processes die: running messages are charged once, held ones are freed, nothing is lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_mq import RetryPolicy, fixed
from django_mq.models import QueuedMessage, WorkerHeartbeat
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import PATIENT, Queue
from tests.acceptance.processes import Worker
from tests.slow import slow

#: The promise is 2 s (guarantee 6); the lease is 300 s here. This machine may be busy.
PROMPT = 60.0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_child(
    start: Callable[..., Worker], queue: Queue, witness: Witness, processes: int
) -> None:
    """Guarantees 1, 3, 6; KAF-10, NSQ-20, RMQ-2: a sibling or replacement settles its messages."""
    worker = start("--processes", processes, **PATIENT)
    ids = dict(zip("abcd", queue.send("gate", *"abcd", gate="open"), strict=True))
    worker.until(
        lambda: len(witness.started()) == processes and queue.leased() > processes,
        "each process runs one message, and one holds more",
    )
    victim = max(holdings().values(), key=len)
    [(name, pid)] = [(n, pid) for n, _, pid in witness.started() if ids[n] in victim]

    os.kill(pid, signal.SIGKILL)

    worker.until(lambda: queue.failures(ids[name]), "the attempt is charged", PROMPT)
    assert queue.failures(ids[name]) == ["WorkerLost"]
    assert queue.message(ids[name]).suspect
    witness.open("open")
    queue.wait_empty(worker, PROMPT)
    attempts = {name: attempt for name, attempt, _ in queue.effects()}
    assert len(queue.effects()) == 4
    assert attempts == {**dict.fromkeys("abcd", 1), name: 2}
    assert f"was killed by SIGKILL while it ran message {ids[name]};" in worker.said()


def holdings() -> dict[str, set[int]]:
    """Return the ids of the messages that each process has claimed."""
    held: dict[str, set[int]] = {}
    for row in QueuedMessage.objects.exclude(claimed_by=None):
        held.setdefault(row.claimed_by.partition(":")[0], set()).add(row.pk)
    return held


@pytest.mark.parametrize(("how", "processes"), [("kill", 2), (0, 1), *slow((5, 1))])
def test_a_message_that_always_kills_its_process(
    start: Callable[..., Worker], queue: Queue, how: str | int, processes: int
) -> None:
    """Guarantee 3: dead after its attempts; its neighbours are all done, and not charged.

    This includes exit codes 0 and 5, which children also use after a drain, or out of time.
    """
    queue.send("write", *[f"before{n}" for n in range(40)])
    [poison] = queue.send("die", "poison", how=how)
    queue.send("write", *[f"after{n}" for n in range(40)])
    worker = start("--processes", processes)
    worker.until(lambda: queue.message(poison).dead_at, "the poison is dead")
    worker.until(lambda: queue.done().total() >= 80, "all others are done")
    assert set(queue.done().values()) == {1}
    assert "poison" not in queue.done()
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    assert queue.failures(poison) == ["WorkerLost"] * 3
    assert [(row.pk, row.attempts, row.dead_reason) for row in queue.left()] == [
        (poison, 3, "exhausted")
    ]
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


def test_a_killed_supervisor(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """Its children finish the running messages and leave, and hold nothing."""
    worker = start("--processes", 2, **PATIENT)
    queue.send("gate", *"abcd", gate="open")
    worker.until(lambda: len(witness.started()) == 2 and queue.leased() > 2, "two run")
    running = {name for name, _, _ in witness.started()}
    worker.tell(signal.SIGKILL)
    worker.ends()
    worker.until(lambda: queue.leased() == 2, "what did not start is released")
    witness.open("open")
    worker.until(lambda: not worker.remaining(), "the children leave")
    assert queue.done() == dict.fromkeys(running, 1)
    assert [(row.attempts, row.leased_until) for row in queue.left()] == [(0, None)] * 2


@pytest.mark.slow
def test_a_lost_host(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """Guarantees 4, 6: no process is left to report, so its leases lapse, and others take over."""
    settings = {"LEASE": 6, "POLL_INTERVAL": 0.5}  # a busy machine may stand still for seconds
    lost = start(mq=settings, **PATIENT)
    [runs, waits] = queue.send("gate", "runs", "waits", gate="open")
    lost.until(lambda: witness.started() and queue.leased() == 2, "one runs, one waits")
    other = start("--threads", 2, mq=settings)  # it may get messages that the busy one released
    other.has_started(1)
    lost.tell_all(signal.SIGKILL)
    other.until(lambda: len(witness.started("runs")) == 2, "it runs again")
    witness.open("open")
    queue.wait_empty(other)
    assert queue.done() == {"runs": 1, "waits": 1}
    assert {pid for _, _, pid in queue.effects()} == set(other.children())
    # Without a report both count as started: at most one attempt more than there was.
    assert queue.failures(runs) == ["WorkerVanished"]
    assert queue.failures(waits) in ([], ["WorkerVanished"])


@pytest.mark.parametrize("kind", ["call", "agate"])
def test_a_lost_host_kills_only_what_it_had_started(
    start: Callable[..., Worker],
    queue: Queue,
    witness: Witness,
    kind: str,
) -> None:
    """Guarantee 3: a message with one attempt dies only if its handler has begun."""
    names = [f"m{n}" for n in range(8)]
    lost = start("--threads", 2, mq={"ASYNC_SLOTS": 2}, **PATIENT)
    never = RetryPolicy.never()
    ids = dict(zip(names, queue.send(kind, *names, gate="open", retry=never), strict=True))
    waits = kind == "call"  # coroutines are claimed only for free slots
    lost.until(lambda: len(witness.started()) == 2, "two run")
    lost.until(lambda: queue.leased() > 2 if waits else queue.leased() == 2, "others wait")
    lost.tell_all(signal.SIGKILL)
    lost.until(lambda: not lost.remaining(), "all processes are gone")
    running = {name for name, _, _ in witness.started()}
    WorkerHeartbeat.objects.all().delete()
    QueuedMessage.objects.filter(leased_until__isnull=False).update(
        leased_until=Now() - timedelta(seconds=1)
    )
    witness.open("open")
    other = start()
    other.until(lambda: len(queue.left()) == 2, "all others are done")
    other.until(lambda: all(row.dead_at for row in queue.left()), "these two are dead")
    assert {row.payload["name"] for row in queue.left()} == running
    assert queue.done() == dict.fromkeys(set(names) - running, 1)
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    failures = {name: queue.failures(id) for name, id in ids.items()}
    assert failures == {name: ["WorkerVanished"] * (name in running) for name in names}


def test_a_storm(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """Guarantees 1, 3, 4; PMQ-59, PMQ-69: children are killed repeatedly, at any point."""
    witness.open("open")
    patient = RetryPolicy(max_attempts=50, backoff=fixed(0.05))
    names = [f"m{n}" for n in range(320)]
    for kind, share in (("write", names[:200]), ("call", names[200:260]), ("acall", names[260:])):
        queue.send(kind, *share, gate="open", pause=0.01, retry=patient)
    worker = start("--processes", 2, "--threads", 2)
    dice = random.Random(48)
    for wanted in range(20, 260, 40):
        worker.until(lambda wanted=wanted: queue.done().total() >= wanted, f"{wanted} are done")
        os.kill(dice.choice(worker.until(worker.alive, "a child is alive")), signal.SIGKILL)
    queue.wait_empty(worker, 60)
    assert queue.done() == dict.fromkeys(names, 1)
    assert not QueuedMessage.objects.exists()
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
