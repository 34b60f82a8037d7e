"""The database goes away: workers wait it out, quietly, and every effect is there once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.conf import settings

from django_mq import RetryPolicy, fixed
from testproject.embedded.server import PORT, Server
from tests.acceptance.app import effects
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import Worker

LOST = "database lost"


def test_terminated_backends(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """Guarantees 1, 16; NSQ-35, CAR-36: all connections are cut, again and again, at any point."""
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


@pytest.fixture
def private() -> Iterator[Server]:
    """A server of this test alone, with the tables."""
    directory = Path(tempfile.mkdtemp(prefix="django_mq-acceptance-"))
    directory.chmod(0o755)  # for the account that runs it
    server = Server(directory)
    try:
        server.create()
        server.start()
        migrate(url_of(server))
        yield server
    finally:
        server.control("stop", "-m", "immediate")
        shutil.rmtree(directory)


def migrate(url: str) -> None:
    subprocess.run(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), "migrate", "--verbosity", "0"],
        env=os.environ
        | {"DJANGO_SETTINGS_MODULE": "tests.acceptance.settings", "DATABASE_URL": url},
        check=True,
        timeout=60,
    )
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(effects.CREATE)


def url_of(server: Server) -> str:
    return f"postgresql://postgres@/postgres?host={server.sockets}&port={PORT}"


def look(server: Server, statement: str, *params: Any) -> list[Any]:
    with psycopg.connect(url_of(server), autocommit=True) as connection:
        return connection.execute(statement, params).fetchall()


def send(server: Server, kind: str, *names: str, **payload: Any) -> None:
    """Broadcast as another program would: by the function, so that a worker routes them."""
    with psycopg.connect(url_of(server), autocommit=True) as connection:
        for name in names:
            connection.execute(
                "select mq_broadcast('work', %s, %s)",
                (f"acceptance.{kind}", psycopg.types.json.Jsonb({**payload, "name": name})),
            )


def done(server: Server) -> list[str]:
    return [name for (name,) in look(server, "select name from acceptance_effect order by name")]


def seconds_used(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks in /proc")
def test_a_server_that_crashes_and_comes_back(
    start: Callable[..., Worker], private: Server, witness: Witness
) -> None:
    """Guarantees 1, 6, 16; NSQ-35: no spinning meanwhile, and then it goes on by itself."""
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

    away, used = monotonic() - began, seconds_used(child) - used
    assert used < 0.25 + away * 0.1
    assert 3 <= worker.said().count(LOST) <= 6
    assert "Traceback" not in worker.said()
    private.start()
    send(private, "write", "after")
    worker.until(lambda: len(done(private)) >= 42, "all are done")
    assert done(private) == ["after", "during", *[f"m{n:02}" for n in range(40)]]
    assert worker.children() == [child]
    worker.says("database is back")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert look(private, "select count(*) from django_mq_queuedmessage") == [(0,)]


def test_a_child_that_dies_while_the_server_is_away(
    start: Callable[..., Worker], private: Server, witness: Witness
) -> None:
    """Guarantee 16, NSQ-35: its replacement waits for the server, as it would have done."""
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
