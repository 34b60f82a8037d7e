"""Guarantees 1, 16: the server's queue of notifications is full; workers poll, nothing fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from django.conf import settings

from testproject.embedded.server import Server
from tests.acceptance.app.witness import Witness
from tests.acceptance.private import directory, done, look, migrate, send, url_of
from tests.acceptance.processes import Worker

#: The smallest queue that the server allows, in pages of 8 kB.
PAGES = 64
#: Takes a page.
NOTIFY = "select pg_notify('other', repeat('x', 7900))"
INSERT = """
insert into django_mq_queuedmessage (queue, type, handler, payload, wants_result, ordered, key)
values (%s, %s, %s, %s, true, false, 'k') returning id
"""
HANDLERS = "tests.acceptance.app.handlers"


@pytest.fixture
def server() -> Iterator[Server]:
    """A server with a small queue of notifications."""
    with directory() as path:
        server = Server(path)
        if server.binaries.major < 17:
            pytest.skip("before PostgreSQL 17 the queue always has 8 GB")
        server.create()
        with (server.data / "postgresql.conf").open("a") as file:
            file.write(f"max_notify_queue_pages = {PAGES}\n")
        try:
            server.start()
            migrate(url_of(server))
            yield server
        finally:
            server.control("stop", "-m", "immediate")


@contextmanager
def full_notifications(server: Server) -> Iterator[None]:
    """Keep a session that listens in a transaction, and fill the queue behind it."""
    with psycopg.connect(url_of(server)) as listener:
        listener.execute("listen other")
        listener.commit()
        listener.execute("select 1")
        with pytest.raises(psycopg.OperationalError, match="too many notifications"):
            fill(server)
        yield


def fill(server: Server) -> None:
    """Fill the queue in many transactions: the server wakes those that listen after each commit."""
    for _ in range(2 * PAGES):
        look(server, NOTIFY)


def store(server: Server, kind: str, name: str, queue: str = "work", **payload: str) -> int:
    """Store a request with an order key: its end rings for the next one of the key."""
    content = psycopg.types.json.Jsonb({**payload, "name": name})
    handler = f"{HANDLERS}.{kind}"
    [(id,)] = look(server, INSERT, queue, f"acceptance.{kind}", handler, content)
    return int(id)


def manage(server: Server, *command: str) -> str:
    """Run a command of manage.py, and return its output."""
    done = subprocess.run(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), *command],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.acceptance.settings",
            "DATABASE_URL": url_of(server),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr.count("Traceback"), done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_full_queue_of_notifications(
    start: Callable[..., Worker], server: Server, witness: Witness
) -> None:
    """Requests are answered and orders obeyed without a ring. The doctor says why all is late."""
    worker = start("--threads", 2, url=url_of(server))
    worker.has_started(1)
    with full_notifications(server):
        asked = [
            store(server, "write", "atomic"),
            store(server, "call", "nonatomic", "calls", gate="open"),
            store(server, "echo", "plain", "answers"),
        ]
        witness.open("open")
        answered = "select message_id from django_mq_result order by 1"
        worker.until(lambda: look(server, answered) == [(id,) for id in asked], "all are answered")
        send(server, "write", "by-sql")
        worker.until(lambda: done(server) == ["atomic", "by-sql", "nonatomic"], "it is found")
        assert look(server, "select count(*) from django_mq_failedattempt") == [(0,)]
        assert "database lost" not in worker.said()
        assert "D010 warning  The server's queue of notifications is" in manage(server, "mq_doctor")
        manage(server, "mq_workers", "quiet", "--all", "--yes")
        worker.says("is quiet")
    has_room = "select pg_notification_queue_usage() < 0.5"
    worker.until(lambda: look(server, has_room) == [(True,)], "nothing keeps the queue full")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
