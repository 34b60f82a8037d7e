"""Draining: running messages end, unstarted ones are released, and the exit code tells."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import PATIENT, Queue
from tests.acceptance.processes import Worker
from tests.slow import slow

STOPS = pytest.mark.parametrize("stop", [signal.SIGTERM, *slow(signal.SIGINT)])


def running_with_neighbours(queue: Queue, witness: Witness, worker: Worker) -> list[int]:
    """Send a message that waits at the gate, and four behind it; wait until two are claimed."""
    [first] = queue.send("gate", "runs", gate="open")
    ids = queue.send("write", "a", "b", "c", "d")
    worker.until(lambda: witness.started("runs") and queue.leased() > 1, "one runs, one waits")
    return [first, *ids]


def drains(queue: Queue, worker: Worker) -> None:
    """Wait until the process has heard of the drain, after its supervisor: it releases the rest."""
    worker.says("draining")
    worker.until(lambda: queue.leased() == 1, "what waits is released")


@STOPS
def test_the_first_signal_drains(
    start: Callable[..., Worker], queue: Queue, witness: Witness, stop: signal.Signals
) -> None:
    """PMQ-69, CAR-35, NSQ-28, KAF-7, KAF-8: the running one ends, the others are unchanged."""
    worker = start(**PATIENT)
    running_with_neighbours(queue, witness, worker)
    worker.tell(stop)
    drains(queue, worker)
    witness.open("open")
    assert worker.ends() == 0
    assert queue.done() == {"runs": 1}
    assert [start[0] for start in witness.started()] == ["runs"]
    assert [(row.attempts, row.leased_until) for row in queue.left()] == [(0, None)] * 4
    assert not worker.remaining()


def test_a_terminal_that_closes_drains(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Its shell and the kernel both send SIGHUP, to each process: that is not "at once"."""
    worker = start(**PATIENT)
    running_with_neighbours(queue, witness, worker)
    worker.tell_all(signal.SIGHUP)
    worker.says("SIGHUP: draining")
    worker.tell_all(signal.SIGHUP)
    worker.tell_all(signal.SIGHUP)
    drains(queue, worker)
    witness.open("open")
    assert worker.ends() == 0
    assert queue.done() == {"runs": 1}
    assert [(row.attempts, row.leased_until) for row in queue.left()] == [(0, None)] * 4


@STOPS
def test_the_second_signal_leaves_at_once(
    start: Callable[..., Worker], queue: Queue, witness: Witness, stop: signal.Signals
) -> None:
    worker = start("--drain-seconds", 600, **PATIENT)
    running_with_neighbours(queue, witness, worker)
    worker.tell(stop)
    worker.says("draining")
    worker.tell(stop)
    assert worker.ends() == -stop
    assert not worker.remaining()
    assert not queue.done()


def test_a_drain_that_takes_too_long_is_cut(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """KAF-7, guarantee 1: exit code 5; the attempt's writes are undone, and it is charged.

    It is no suspect: the end of its process was planned.
    """
    worker = start("--drain-seconds", 0.5, **PATIENT)
    first, *_ = running_with_neighbours(queue, witness, worker)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 5
    assert re.search(r"stopped: its drain ran out of time with 1 message unfinished", worker.said())
    assert re.search(
        r"started: it only settles the messages of processes that ended, process \d+", worker.said()
    )
    assert not queue.done()
    cut, *others = queue.left()
    assert (cut.id, cut.attempts, cut.leased_until) == (first, 1, None)
    assert not cut.suspect
    assert queue.failures(first) == ["WorkerLost"]
    assert "mq_worker was told to stop, and the drain ran out of time" in cut.last_error
    assert [(row.attempts, row.leased_until) for row in others] == [(0, None)] * 4


@pytest.mark.slow
def test_coroutines_that_were_cut_run_beside_each_other_again(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """As suspects they would run one after another: after a deploy, the fleet would crawl."""
    ids = queue.send("acall", *map(str, range(20)), gate="open")
    worker = start("--drain-seconds", 0.2)
    worker.until(lambda: len(witness.started()) == len(ids), "all run")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 5
    again = start()
    again.until(lambda: len(witness.started()) == 2 * len(ids), "all run again")
    witness.open("open")
    queue.wait_empty(again)
    assert {len(queue.failures(id)) for id in ids} == {1}


@pytest.mark.parametrize("kind", ["call", "acall"])
def test_drain_finishes_nonatomic_and_async_handlers(
    start: Callable[..., Worker], queue: Queue, witness: Witness, kind: str
) -> None:
    """NSQ-28 for handlers that are not atomic, and for async ones."""
    worker = start()
    queue.send(kind, "runs", gate="open")
    worker.until(witness.started, "it runs")
    worker.tell(signal.SIGTERM)
    worker.says("draining")
    witness.open("open")
    assert worker.ends() == 0
    assert queue.done() == {"runs": 1}
    assert queue.empty()


@pytest.mark.slow
def test_coroutines_clean_up_before_their_process_is_gone(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    worker = start("--drain-seconds", 3)
    names = {f"runs-{number}" for number in range(50)}
    ids = queue.send("aclean", *names)
    worker.until(lambda: len(witness.started()) == 50, "all run")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 5
    cleaned = {name for name, *_ in witness.started() if name.startswith("cleaned-")}
    assert cleaned == {f"cleaned-{name}" for name in names}
    assert all(queue.failures(id) == ["WorkerLost"] for id in ids)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks in /proc")
def test_a_signal_while_the_children_start(start: Callable[..., Worker]) -> None:
    """Even a very early signal is obeyed: a container may be stopped while it starts."""
    worker = start("--processes", 8)
    worker.until(lambda: handles_sigterm(worker.pid), "signals are handled")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert not worker.remaining()
    assert "ERROR" not in worker.said()


def handles_sigterm(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(caught and int(caught[1], 16) & 1 << signal.SIGTERM - 1)
