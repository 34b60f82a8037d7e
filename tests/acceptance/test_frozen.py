"""A frozen worker loses its leases, and its actions after it wakes up have no effect."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psycopg
import pytest

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import Worker
from tests.slow import slow

SHORT = {"LEASE": 2, "POLL_INTERVAL": 0.5}
#: Of the worker that takes over: on a busy machine, it must not lose a short lease in its turn.
LONG = {"LEASE": 300, "POLL_INTERVAL": 0.5}


def another_takes_over(zombie: Worker, other: Worker, queue: Queue, witness: Witness) -> None:
    """The frozen worker wakes up and finishes first, but only the effect of the other is there."""
    other.until(lambda: len(witness.started()) == 2, "the other worker has it")
    witness.open("open1")
    zombie.tell_all(signal.SIGCONT)
    zombie.says("LeaseLost")
    assert not queue.done()
    witness.open("open2")
    queue.wait_empty(other)
    assert [(attempt, pid) for _, attempt, pid in queue.effects()] == [(2, other.children()[0])]


@pytest.mark.parametrize("kind", ["call", *slow("acall", "late")])
def test_a_zombie_outside_a_transaction_is_fenced(
    start: Callable[..., Worker], queue: Queue, witness: Witness, kind: str
) -> None:
    """Guarantees 4, 5, 6: the other takes it after the lease, and only its effect is there."""
    zombie = start(mq=SHORT)
    [id] = queue.send(kind, "m", gate="open{attempt}")
    zombie.until(witness.started, "it runs")
    zombie.tell_all(signal.SIGSTOP)
    other = start(mq=LONG)
    another_takes_over(zombie, other, queue, witness)
    assert queue.failures(id) == ["WorkerVanished"]
    zombie.tell(signal.SIGTERM)
    assert zombie.ends() == 0


def test_a_zombie_in_its_transaction_is_fenced(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Guarantees 1, 4: the server ended the idle transaction (here: at once), so it holds nothing.

    The real limit is the handler's timeout and 30 s: too long for a test.
    """
    zombie = start(mq=SHORT)
    [id] = queue.send("gate", "m", gate="open{attempt}")
    zombie.until(witness.started, "it runs")
    zombie.tell_all(signal.SIGSTOP)
    with psycopg.connect(database_url(), autocommit=True) as server:
        server.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and state = 'idle in transaction'"
        )
    other = start(mq=LONG)
    another_takes_over(zombie, other, queue, witness)
    assert queue.failures(id) == ["WorkerVanished"]
    queue.send("write", "next")
    queue.wait_empty(other)
    zombie.tell(signal.SIGTERM)
    assert zombie.ends() == 0
