"""The database goes away: workers wait quietly, and every effect is there once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import psycopg
import pytest
from django.db import transaction

from django_mq import RetryPolicy, broadcast, fixed
from testproject.embedded.server import Server
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.private import done, look, running, send, url_of
from tests.acceptance.processes import Worker

LOST = "database lost"
REFUSED = "the database refused a statement"


def test_terminated_backends(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """Guarantees 1, 16; NSQ-35, CAR-36: all connections are cut repeatedly, at any point."""
    witness.open("open")
    patient = RetryPolicy(max_attempts=50, backoff=fixed(0.05))
    names = [f"m{n}" for n in range(300)]
    queue.send("write", *names[:220], pause=0.01, retry=patient)
    queue.send("call", *names[220:260], gate="open", retry=patient)
    queue.send("acall", *names[260:], gate="open", retry=patient)
    worker = start("--processes", 2, "--threads", 2)
    with psycopg.connect(database_url(), autocommit=True) as server:
        for wanted in (20, 80, 140, 200):
            worker.until(lambda wanted=wanted: queue.done().total() >= wanted, f"{wanted} done")
            server.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            queue.reconnect()
    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys(names, 1)
    assert worker.said().count(LOST) <= 4 * 2 * 3
    assert len(worker.children()) == 2
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


#: Cancels what other new sessions run, many times.
CANCEL = """
do $$ begin
    for n in 1..300 loop
        perform pg_stat_clear_snapshot();
        perform pg_cancel_backend(pid) from pg_stat_activity
        where datname = current_database() and state <> 'idle' and pid <> pg_backend_pid()
            and not pid = any({known}::int[]);
        perform pg_sleep(0.003);
    end loop;
end $$
"""


@pytest.mark.thorough
def test_cancelled_statements(start: Callable[..., Worker], queue: Queue) -> None:
    """Guarantees 1, 16: an operator's tool cancels statements, COMMIT and ROLLBACK among them."""
    patient = RetryPolicy(max_attempts=500, backoff=fixed(0.05))
    names = [f"m{n}" for n in range(400)]
    keyed = [f"k{n}" for n in range(100)]
    queue.send("write", *names, pause=0.01, retry=patient)
    with transaction.atomic():
        for name in keyed:
            broadcast("acceptance.write", {"name": name}, key=name[-1], retry=patient)
    with psycopg.connect(database_url(), autocommit=True) as server:
        known = server.execute("select array_agg(pid)::text from pg_stat_activity").fetchone()
        assert known
        worker = start("--threads", 2)
        worker.has_started(1)
        server.execute(CANCEL.format(known=f"'{known[0]}'"))
    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys(names + keyed, 1)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert worker.said().count(REFUSED) <= 3 * 3


@pytest.fixture
def private() -> Iterator[Server]:
    with running() as server:
        yield server


def seconds_used(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks in /proc")
def test_a_server_that_crashes_and_comes_back(
    start: Callable[..., Worker], private: Server, witness: Witness
) -> None:
    """Guarantees 1, 6, 16; NSQ-35: the worker does not spin, and then continues by itself."""
    send(private, "gate", "during", gate="open")
    send(private, "write", *[f"m{n:02}" for n in range(40)])
    worker = start("--threads", 2, url=url_of(private))
    worker.until(lambda: witness.started("during"), "one is in its transaction")
    worker.until(lambda: len(done(private)) >= 30, "most others are done")
    [child] = worker.children()
    began, used = monotonic(), seconds_used(child)

    private.control("stop", "-m", "immediate")
    witness.open("open")
    worker.says(f"{LOST}.*trying again in 2 s")
    said = worker.said()

    away, used = monotonic() - began, seconds_used(child) - used
    assert used < 0.25 + away * 0.1
    assert 3 <= said.count(LOST) <= 6
    assert "Traceback" not in said
    private.start()
    send(private, "write", "after")
    worker.until(lambda: len(done(private)) >= 42, "all are done")
    assert done(private) == ["after", "during", *[f"m{n:02}" for n in range(40)]]
    assert worker.children() == [child]
    worker.says("database is back")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert look(private, "select count(*) from django_mq_queuedmessage") == [(0,)]


@pytest.mark.thorough
def test_a_child_that_dies_while_the_server_is_away(
    start: Callable[..., Worker], private: Server, witness: Witness
) -> None:
    """Guarantee 16, NSQ-35: its replacement waits for the server, like the child it replaces."""
    worker = start(url=url_of(private))
    worker.has_started(1)
    private.control("stop", "-m", "immediate")
    worker.says(LOST)
    worker.kill_child(0)
    worker.has_started(2)
    said = len(worker.said())
    worker.until(lambda: LOST in worker.said()[said:], "the replacement waits too")
    private.start()
    send(private, "write", "after")
    worker.until(lambda: done(private) == ["after"], "it goes on")
    assert len(worker.children()) == 2
    assert "Traceback" not in worker.said()
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
