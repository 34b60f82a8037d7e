"""A dead child is replaced at once if it has worked, and with a brake if it never does."""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from django.db import connection

from django_mq import RetryPolicy, fixed
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.slow import slow

#: The promise is 2 s (guarantee 26). This machine may be busy; a brake soon takes far longer.
PROMPT = 10.0

#: A project whose processes die at their start while it is sick.
SICK = """
import os
from pathlib import Path
from django_mq.signals import worker_started

hoard = []

def die(**kwargs):
    sick = Path(os.environ["ACCEPTANCE_DIR"]) / "sick.gate"
    if sick.exists():
        {how}

worker_started.connect(die, weak=False)
"""
HOW = {
    "kill": "os.kill(os.getpid(), 9)",
    "exit": "os._exit(3)",
    "grow": "hoard.append(b'x' * 2**28)",
}


@pytest.fixture
def start_sick(
    start: Callable[..., Worker], tmp_path: Path, witness: Witness
) -> Callable[..., Worker]:
    """Start a project that can be made sick, and already is."""

    def start_sick(*options: str | int, how: str = "kill") -> Worker:
        (tmp_path / "sickness.py").write_text(SICK.format(how=HOW[how]))
        witness.open("sick")
        return start(*options, ACCEPTANCE_IMPORT="sickness", PYTHONPATH=str(tmp_path))

    return start_sick


def recover(witness: Witness) -> None:
    (witness.directory / "sick.gate").unlink()


def brakes(worker: Worker) -> list[str]:
    """Return the times at which the dead children were to be replaced, in order."""
    return re.findall(r"; restarting (now|in \d+ s)", worker.said())


@pytest.mark.parametrize("processes", [1, *slow(2)])
def test_poison_message_delays_no_other(
    start: Callable[..., Worker], queue: Queue, processes: int
) -> None:
    """Guarantee 26: it dies eight times; messages sent in between are handled promptly."""
    worker = start("--processes", processes)
    worker.has_started(processes)
    often = RetryPolicy(max_attempts=8, backoff=fixed(0.1))
    [poison] = queue.send("die", "poison", how="kill", retry=often)
    for number in itertools.count():
        queue.send("write", f"m{number}")
        worker.until(lambda name=f"m{number}": queue.done()[name], "it is handled", PROMPT)
        if queue.message(poison).dead_at:
            break
    assert queue.failures(poison) == ["WorkerLost"] * 8
    assert set(queue.done().values()) == {1}
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    assert brakes(worker) == ["now"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_children_that_die_before_they_work_are_braked(
    start_sick: Callable[..., Worker], queue: Queue, witness: Witness, how: str
) -> None:
    """Guarantee 16: one line per death, after 1 s, 2 s, 4 s; all work is done in the end."""
    worker = start_sick(how=how)
    queue.send("write", "waits")
    worker.until(lambda: len(brakes(worker)) == 3, "three have died")
    assert brakes(worker) == ["in 1 s", "in 2 s", "in 4 s"]
    lines = [line for line in worker.said().splitlines() if " django_mq: " in line]
    assert [line for line in lines if "WARNING" not in line] == [
        line for line in lines if "while it ran nothing; restarting in" in line
    ]
    recover(witness)
    queue.wait_empty(worker)
    assert queue.done() == {"waits": 1}


@pytest.mark.slow
def test_children_that_are_too_large_before_they_work_are_braked(
    start_sick: Callable[..., Worker],
) -> None:
    """Children are replaced after 1 s, then after 2 s, though a replacement does not help."""
    worker = start_sick("--max-rss", 240, how="grow")
    worker.until(lambda: len(worker.children()) == 3, "two were replaced")
    starts = re.findall(r"(\S+ \S+),(\d+) INFO .* started: ", worker.said())
    moments = [datetime.fromisoformat(f"{second}.{thousandth}") for second, thousandth in starts]
    first, second = (later - earlier for earlier, later in itertools.pairwise(moments))
    assert first >= timedelta(seconds=0.9)
    assert second >= timedelta(seconds=1.9)


def test_a_child_that_worked_takes_the_brake_off(
    start_sick: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """The child is killed later, while idle; the next crash loop starts with the shortest brake."""
    worker = start_sick()
    worker.until(lambda: len(brakes(worker)) == 2, "two have died")
    recover(witness)
    worker.has_started(1)
    queue.send("write", "first")
    queue.wait_empty(worker)
    worker.kill_child(0)
    worker.has_started(2)
    witness.open("sick")
    queue.send("write", "second")
    queue.wait_empty(worker)
    worker.kill_child(1)
    worker.until(lambda: len(brakes(worker)) == 6, "two more have died")
    assert brakes(worker) == ["in 1 s", "in 2 s", "now", "now", "in 1 s", "in 2 s"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_brake(
    start_sick: Callable[..., Worker], queue: Queue, stop: signal.Signals
) -> None:
    """A supervisor without children drains at once; there is no process to wait for."""
    worker = start_sick()
    worker.until(lambda: len(brakes(worker)) == 3, "the brake is 4 s")
    worker.tell(stop)
    assert worker.ends(PROMPT) in (0, 1)
    assert not worker.remaining()


@pytest.fixture
def no_table(empty_tables: None) -> Iterator[Callable[[], None]]:
    """Remove the messages' table behind the migrations' back; yield a function that restores it."""
    with connection.cursor() as cursor:
        cursor.execute("alter table django_mq_queuedmessage rename to mq_away")
        bring_back = partial(
            cursor.execute, "alter table if exists mq_away rename to django_mq_queuedmessage"
        )
        yield bring_back
        bring_back()


def test_an_error_where_a_child_starts_is_one_line_for_each(
    start: Callable[..., Worker], no_table: Callable[[], None]
) -> None:
    """Guarantee 16: with class and text; only the first has a traceback before it."""
    worker = start()
    worker.until(lambda: len(brakes(worker)) == 2, "two have died")
    said = worker.said()
    assert said.count("worker failed") == 1, said
    assert "UndefinedTable" in said.split("Traceback")[1]
    deaths = [line for line in said.splitlines() if " ERROR " in line or " INFO " in line]
    assert "worker failed" in deaths.pop(0)
    assert len(deaths) == 2
    for death in deaths:
        assert re.search(r"failed \(UndefinedTable: .*django_mq_queuedmessage.*; restarting", death)
    no_table()
    worker.has_started(1)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets limits of another process")
def test_no_room_for_a_process_is_waited_out(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """The supervisor is out of descriptors, or the system out of processes: siblings continue."""
    worker = start("--processes", 2)
    worker.has_started(2)
    queue.send("write", "before")
    queue.wait_empty(worker)
    [(_, _, pid)] = queue.effects()
    limits = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    os.kill(pid, signal.SIGKILL)
    worker.until(lambda: len(refusals(worker)) == 2, "two tries have failed")
    queue.send("write", "meanwhile")
    queue.wait_empty(worker)
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, limits)
    worker.has_started(3)
    assert refusals(worker)[:2] == ["in 1 s", "in 2 s"]
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


def test_child_stopped_from_outside_is_replaced(start: Callable[..., Worker], queue: Queue) -> None:
    """Such as earlyoom, which ends the largest process by SIGTERM. The worker ended, with 0."""
    worker = start()
    worker.kill_child(0, signal.SIGTERM)
    worker.has_started(2)
    queue.send("write", "m")
    queue.wait_empty(worker)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


def refusals(worker: Worker) -> list[str]:
    return re.findall(r"cannot start a worker process .*; trying again (in \d+ s)", worker.said())


@pytest.mark.parametrize("stop", [signal.SIGINT, *slow(signal.SIGTERM)])
def test_a_signal_amid_restarts(
    start: Callable[..., Worker], queue: Queue, stop: signal.Signals
) -> None:
    """Sent to the whole group, like Ctrl-C, while a process is forked, starts or dies: all obey."""
    often = RetryPolicy(max_attempts=1000, backoff=fixed(0.01))
    queue.send("die", "poison", how="kill", retry=often)
    worker = start("--processes", 2)
    worker.until(lambda: len(brakes(worker)) >= 5, "five have died")
    worker.tell_all(stop)
    assert worker.ends() in (0, 1)
    assert not worker.remaining()
    assert queue.leased() == 0


#: A project that logs to standard output, whose reader has gone.
UNREAD = """
import logging, os, sys

reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
logging.raiseExceptions = False
logging.getLogger("django_mq").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("django_mq").warning("buffered, and never written")
"""


@pytest.mark.slow
def test_log_without_a_reader(start: Callable[..., Worker], queue: Queue, tmp_path: Path) -> None:
    """The supervisor still replaces processes: it flushes what it printed before each fork."""
    (tmp_path / "unread.py").write_text(UNREAD)
    more = {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": ""}
    worker = start(ACCEPTANCE_IMPORT="unread", **more)
    worker.kill_child(0)
    worker.has_started(2)
    queue.send("write", "m")
    queue.wait_empty(worker)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
