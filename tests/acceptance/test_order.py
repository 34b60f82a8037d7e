"""Lines over a fleet of processes run one message at a time and in order, despite failures."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from django_mq import Message, broadcast_many
from django_mq.models import QueuedMessage, QueueState
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker

SETTINGS: dict[str, Any] = {"LEASE": 5, "QUEUES": {"line": {"ordered": True}}}


def send(line: str, numbers: range, *, queue: str, **payload: Any) -> None:
    """Broadcast `numbers` of `line` in one transaction."""
    key = line if queue == "keyed" else None
    with transaction.atomic():
        broadcast_many(
            [
                Message(
                    "acceptance.line",
                    {"name": f"{line}:{n}", "line": line, **payload},
                    queue=queue,
                    key=key,
                )
                for n in numbers
            ]
        )


def violations(queue: Queue, witness: Witness, lines: int, each: int) -> list[str]:
    """Return the messages that ran beside, or after, a later message of their line."""
    found = [name for name, _, _ in witness.started() if name.startswith("overlap-")]
    last: dict[str, int] = {}
    for name, _, _ in queue.effects():
        line, _, number = name.partition(":")
        if int(number) != last.get(line, -1) + 1:
            found.append(f"{name} after {last.get(line)}")
        last[line] = int(number)
    if set(last.values()) != {each - 1} or len(last) != lines:
        found.append(f"not all: {last}")
    return found


def test_keys_in_a_storm(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """PMQ-43, KAF-2: keys run in order, one message at a time, despite failures and kills."""
    lines, each = 12, 40
    for n in range(0, each, 20):
        for line in range(lines):
            send(f"k{line}", range(n, n + 20), queue="keyed", share=0.1, pause=0.002)
    worker = start("--processes", 3, "--threads", 2, "--batch-size", 10, mq={"LEASE": 5})
    dice = random.Random(7)
    for wanted in range(60, lines * each, 70):
        worker.until(lambda wanted=wanted: queue.done().total() >= wanted, f"{wanted} are done")
        os.kill(dice.choice(worker.until(worker.alive, "a child is alive")), signal.SIGKILL)
    queue.wait_empty(worker, 120)
    assert violations(queue, witness, lines, each) == []


def test_an_ordered_queue_in_a_storm(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """PMQ-41, PMQ-43, PMQ-46, PMQ-47: one line, while its owner is killed repeatedly."""
    with transaction.atomic():
        for n in range(0, 100, 20):  # five batches of twenty in one transaction
            send("l", range(n, n + 20), queue="line", share=0.05, pause=0.002)
    worker = start("--processes", 2, "--threads", 2, mq=SETTINGS)
    for wanted in (15, 40, 65, 90):
        worker.until(lambda wanted=wanted: queue.done().total() >= wanted, f"{wanted} are done")
        pid = queue.effects()[-1][2]  # the process of the last effect owns the line
        # On a busy machine, the process killed last may have done all of these before it died.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    queue.wait_empty(worker, 120)
    assert violations(queue, witness, 1, 100) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_a_line_moves_on(
    start: Callable[..., Worker], queue: Queue, witness: Witness, how: signal.Signals
) -> None:
    """The owner drains, loses its host, or freezes: another gets the line within seconds."""
    owner = start(mq={**SETTINGS, "LEASE": 300})
    send("l", range(5), queue="line")
    owner.until(lambda: queue.done().total() == 5, "it has the line")
    other = start(mq={**SETTINGS, "LEASE": 300})
    other.has_started(1)
    send("l", range(5, 30), queue="line", pause=0.1)
    owner.until(lambda: queue.done().total() > 5, "it is in the midst of it")
    before = owner.children()
    if how == signal.SIGTERM:
        owner.tell(how)
    else:
        owner.tell_all(how)
    # The owner's lease is 6 s, where a message's is 300 s; this machine may be busy.
    other.until(
        lambda: any(pid not in before for _, _, pid in queue.effects()), "the other goes on"
    )
    assert QueueState.objects.get(queue="line").owner
    other.until(lambda: not QueuedMessage.objects.filter(queue="line").exists(), "all are done")
    if how == signal.SIGSTOP:
        owner.tell_all(signal.SIGCONT)
    assert violations(queue, witness, 1, 30) == []
