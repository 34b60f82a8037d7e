"""No connection, pool, socket or thread is shared by two processes. Guarantee 25."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import Worker
from tests.database import second_connection
from tests.slow import slow
from tests.waiting import until
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks in /proc")

#: Identifies these workers' sessions in the server.
NAME = "mq-fork-test"

#: Code that a project may run where it is loaded, and inside the supervisor's own logging.
CONNECTS = """
import logging
from threading import Thread
from django.db import connections

def connect():
    for alias in connections:
        with connections[alias].cursor() as cursor:
            cursor.execute("select 1")

class ToTheDatabase(logging.Handler):
    def emit(self, record):
        if record.event == "worker_died":
            connect()

connect()
thread = Thread(target=connect)
thread.start()
thread.join()
logging.getLogger("django_mq").addHandler(ToTheDatabase())
"""

#: Resources that only their owner can close.
KEEPS_OPEN = """
import threading
import psycopg
from django.db import connection

link = psycopg.connect(**connection.get_connection_params())
threading.Thread(target=threading.Event().wait, name="metrics", daemon=True).start()
"""


POOL = {"min_size": 2, "max_size": 4}


@pytest.fixture
def proxy(empty_tables: None) -> Iterator[Proxy]:
    """Force TCP, so that /proc tells which sockets lead to the server."""
    proxy = Proxy(connection.get_connection_params())
    yield proxy
    proxy.close()


@pytest.fixture
def start_with(
    start: Callable[..., Worker], proxy: Proxy, tmp_path: Path
) -> Callable[[str, Any], Worker]:
    """Start two children on two aliases, with `code` in the project's handlers.py."""

    def start_with(code: str, pool: Any) -> Worker:
        (tmp_path / "imported_at_start.py").write_text(code)
        options = {"host": "127.0.0.1", "port": proxy.port, "application_name": NAME}
        if pool:
            options["pool"] = pool
        return start(
            *("--processes", 2),
            url=database_url(),
            database={"OPTIONS": options},
            ACCEPTANCE_ALIASES=json.dumps({"other": {}}),
            ACCEPTANCE_IMPORT="imported_at_start",
            PYTHONPATH=str(tmp_path),
        )

    return start_with


def sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that process `pid` has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except FileNotFoundError:
            continue
        if match:
            found.add(int(match[1]))
    return found


def leading_to(port: int) -> set[int]:
    """Return the inodes of all established TCP sockets whose other end is `port`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(r[9]) for r in rows if int(r[2].split(":")[1], 16) == port and r[3] == "01"}


def sessions() -> int:
    with second_connection() as server:
        asked = server.execute(
            "select count(*) from pg_stat_activity where application_name = %s", [NAME]
        )
        return asked.fetchone()[0]


def has_sockets_of_its_own(worker: Worker, proxy: Proxy) -> bool:
    """Say whether each session is one socket of one child; AssertionError if any is shared."""
    held = {pid: sockets(pid) for pid in (worker.pid, *worker.alive())}
    holders = Counter(inode for inodes in held.values() for inode in inodes)
    links = leading_to(proxy.port)
    # Not the link of a new child: its supervisor has both ends until fork() has returned.
    shared = [inode for inode in links if holders[inode] > 1]
    assert not shared, f"sockets {shared} are shared by {held}"
    assert not held.pop(worker.pid) & links, "the supervisor is connected"
    own = [len(inodes & links) for inodes in held.values()]
    # The executor connects for its first message; the recovery of a dead sibling keeps a connection
    # for half a minute. All others connect at once.
    return len(own) == 2 and set(own) <= {3, 4, 5} and sessions() == sum(own)


@pytest.mark.parametrize(
    ("pool", "code"),
    [
        pytest.param(POOL, CONNECTS, id="pool-connects"),
        *slow(
            pytest.param(False, "", id="plain"),
            pytest.param(False, CONNECTS, id="connects"),
            pytest.param(POOL, "", id="pool"),
        ),
    ],
)
def test_each_session_is_of_one_process(
    start_with: Callable[..., Worker], queue: Queue, proxy: Proxy, pool: Any, code: str
) -> None:
    """A child has `threads + 3` sessions, the supervisor none, even after it replaces children.

    The child that settles what a dead one held has another one for half a minute.

    This holds whatever connections the project opened on any alias: where it was loaded, in
    a thread that has ended, or in a log handler.
    """
    worker = start_with(code, pool)
    worker.has_started(2)
    worker.until(lambda: has_sockets_of_its_own(worker, proxy), "as many sessions as sockets")
    for number in (0, 2):
        queue.send("write", f"before{number}")
        queue.wait_empty(worker)
        worker.kill_child(number)
        worker.has_started(number // 2 + 3)
    worker.until(lambda: has_sockets_of_its_own(worker, proxy), "as many sessions as sockets")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    until(lambda: not sessions(), "the server ends their sessions")


def test_open_connections_and_threads_are_logged_once(
    start_with: Callable[..., Worker], queue: Queue
) -> None:
    """A bare driver connection and a thread: only the project can close them."""
    worker = start_with(KEEPS_OPEN, False)
    worker.has_started(2)
    queue.send("write", "before")
    queue.wait_empty(worker)
    worker.kill_child(0)
    worker.has_started(3)
    [warning] = [line for line in worker.said().splitlines() if "would inherit" in line]
    assert re.search(r": connection to 127\.0\.0\.1:\d+, thread metrics\.", warning)


@pytest.mark.slow
def test_nothing_is_named_where_nothing_is_open(
    start_with: Callable[..., Worker], queue: Queue
) -> None:
    """Connections that the supervisor owns, or has closed, are not named."""
    worker = start_with(CONNECTS, {"min_size": 2})
    worker.has_started(2)
    queue.send("write", "before")
    queue.wait_empty(worker)
    worker.kill_child(0)
    worker.has_started(3)
    assert "would inherit" not in worker.said()


def test_children_share_the_memory_of_the_supervisor(
    start: Callable[..., Worker], queue: Queue
) -> None:
    """A garbage collection in a child writes to no object that it got from the supervisor."""
    worker = start("--processes", 2)
    worker.has_started(2)
    queue.send("write", "one")
    queue.wait_empty(worker)
    for pid in worker.alive():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines}
        assert kilobytes["Private_Dirty:"] < 0.4 * kilobytes["Rss:"], kilobytes


@pytest.mark.parametrize(
    "among", ["forks", "calls", "acalls", *slow("finishes", "blocking", "threads")]
)
def test_a_process_that_a_handler_forks_ends_with_the_handler(
    start: Callable[..., Worker], queue: Queue, witness: Witness, among: str
) -> None:
    """It must not go on as a second worker on the same connections."""
    ids = queue.send("fork", "return", "sys.exit", "raise", queue=among)
    worker = start("--queue", among, ACCEPTANCE_IMPORT="tests.acceptance.app.forking")
    queue.wait_empty(worker)
    for ended in ("return-0", "sys.exit-3", "raise-1"):
        assert len(witness.started(ended)) == 1, ended
    assert not any(queue.failures(id) for id in ids)
    worker.says("a process that a handler forked failed: KeyError")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
