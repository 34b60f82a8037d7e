"""The promises of the options of `mq_worker`."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.slow import slow
from tests.supervisor.test_service import heard, unit


def names(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


def once(count: int) -> Counter[str]:
    return Counter(names(count))


def test_until_empty(start: Callable[..., Worker], queue: Queue) -> None:
    """The worker ends by itself once all due messages are done; later ones stay."""
    queue.send("write", *names(250))
    [later] = queue.send("write", "later")
    row = queue.message(later)
    row.processable_after += timedelta(days=365)
    row.save()
    worker = start("--until-empty")
    assert worker.ends() == 0
    assert queue.done() == once(250)
    assert [row.id for row in queue.left()] == [later]


def test_processes_and_threads(start: Callable[..., Worker], queue: Queue) -> None:
    """PMQ-59, PMQ-69, CAR-33: two processes share a queue, each message once."""
    worker = start("--processes", 2, "--threads", 2)
    worker.has_started(2)
    queue.send("write", *names(200), pause=0.02)
    queue.wait_empty(worker)
    assert queue.done() == once(200)
    assert {pid for _, _, pid in queue.effects()} == set(worker.children())
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.parametrize(("processes", "threads"), [(1, 2), *slow((2, 1))])
def test_nothing_waits_behind_one_that_blocks(
    start: Callable[..., Worker], queue: Queue, witness: Witness, processes: int, threads: int
) -> None:
    """PMQ-48, PMQ-49: while one executor is blocked, free ones take all the other messages."""
    worker = start("--processes", processes, "--threads", threads)
    worker.has_started(processes)
    queue.send("gate", "blocks", gate="open")
    queue.send("write", *names(8))
    worker.until(lambda: queue.done() == once(8), "all others are done", 45)
    witness.open("open")
    queue.wait_empty(worker)


def test_max_messages(start: Callable[..., Worker], queue: Queue) -> None:
    """Exactly that number is done; messages that did not start are unchanged."""
    queue.send("write", *names(40))
    assert start("--max-messages", 25, "--processes", 2).ends() == 0
    assert queue.done().total() == 25
    assert [(row.attempts, row.leased_until) for row in queue.left()] == [(0, None)] * 15


@pytest.mark.slow
def test_max_messages_counts_over_processes_that_died(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """A replacement continues the count of the dead process."""
    queue.send("write", *names(5))
    worker = start("--max-messages", 10, "--batch-size", 1)
    worker.until(lambda: queue.done().total() == 5, "five are done")
    worker.has_started(1)
    worker.kill_child(0)
    worker.has_started(2)
    queue.send("write", *[f"late{number}" for number in range(20)])
    assert worker.ends() == 0
    assert 8 <= queue.done().total() <= 10


@pytest.mark.slow
def test_max_seconds(start: Callable[..., Worker], queue: Queue, tmp_path: Path) -> None:
    """The worker ends by itself, after all messages that came before are done; systemd is told."""
    queue.send("write", "a")
    with unit(str(tmp_path / "notify")) as link:
        worker = start("--max-seconds", 5, NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert worker.ends() == 0
        assert heard(link) == [b"READY=1", b"STOPPING=1"]
    assert queue.done() == {"a": 1}


def test_max_rss(start: Callable[..., Worker], queue: Queue) -> None:
    """A process that grew is drained and replaced: no message is lost, run twice, or charged."""
    queue.send("grow", *names(12), megabytes=40)
    worker = start("--max-rss", 240)
    queue.wait_empty(worker)
    assert queue.done() == once(12)
    assert {attempt for _, attempt, _ in queue.effects()} == {1}
    assert len({pid for _, _, pid in queue.effects()}) > 1
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert re.search(r"uses \d+ MB, more than MAX_RSS: draining and replacing", worker.said())
    assert "ERROR" not in worker.said()


def test_max_rss_below_the_size_of_an_idle_worker(start: Callable[..., Worker]) -> None:
    """The worker reports the limit at its start, and does not replace processes for ever."""
    for worker in (start("--max-rss", 10), start(mq={"MAX_RSS": 10})):
        assert worker.ends() == 1
        assert "max-rss" in worker.said()


def test_queues_in_strict_preference(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Only the named queues are served, in the order given, whatever the age of their messages."""
    queue.send("write", "w0", "w1", queue="work")
    queue.send("write", "s0", "s1", queue="second")
    queue.send("write", "f0", "f1", queue="first")
    assert start("--queue", "first", "--queue", "second", "--until-empty").ends() == 0
    assert [name for name, _, _ in witness.started()] == ["f0", "f1", "s0", "s1"]
    assert [row.queue for row in queue.left()] == ["work", "work"]


def test_queues_by_pattern(start: Callable[..., Worker], queue: Queue) -> None:
    queue.send("write", "w", queue="work")
    queue.send("write", "in", queue="mail.in")
    queue.send("write", "out", queue="mail.out")
    assert start("--queue", "mail.*", "--until-empty").ends() == 0
    assert queue.done() == {"in": 1, "out": 1}


@pytest.mark.parametrize("kind", ["write", *slow("call", "acall")])
def test_an_idle_worker_is_woken(
    start: Callable[..., Worker], queue: Queue, witness: Witness, kind: str
) -> None:
    """Guarantee 7 covers the poll; this tests the ring, with a poll interval of a minute."""
    witness.open("open")
    worker = start(mq={"POLL_INTERVAL": 60})
    worker.has_started(1)
    queue.send(kind, "first", gate="open")
    queue.wait_empty(worker, 20)
    queue.send(kind, "second", gate="open")
    queue.wait_empty(worker, 20)
    assert queue.done() == {"first": 1, "second": 1}
