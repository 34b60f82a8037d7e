"""Behind a transaction pooler, a session lasts only for a transaction. Guarantee 17."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from django.db import connection, connections

from django_mq import handler, handlers, queues
from django_mq.executor.watchdog import Link
from django_mq.queues.doctor.links import limits
from django_mq.worker.listener import Listener
from django_mq.worker.wakeup import Wakeup
from testproject.embedded.places import Account
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import Worker
from tests.database import second_connection
from tests.ports import free_port
from tests.waiting import until

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@pytest.fixture
def pooled(empty_tables: None) -> Iterator[str]:
    """The URL of the test database through pgbouncer, with fewer connections than a worker has."""
    with pooler(mode="transaction", size=3) as url:
        yield url


@contextmanager
def pooler(*, mode: str, size: int) -> Iterator[str]:
    """Run pgbouncer in front of the test database; yield the URL."""
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    given = connection.get_connection_params()
    port, account = free_port(), Account.choose()
    directory = Path(tempfile.mkdtemp(prefix="django_mq-pooler-"))
    account.give(directory)
    place = f"host={given.get('host') or '/var/run/postgresql'} port={given.get('port') or 5432}"
    (directory / "users").write_text(f'"{given["user"]}" "{given.get("password") or ""}"\n')
    (directory / "config").write_text(
        f"""
        [databases]
        {given["dbname"]} = {place} dbname={given["dbname"]}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = trust
        auth_file = {directory}/users
        pool_mode = {mode}
        default_pool_size = {size}
        """.replace("\n        ", "\n")
    )
    account.give(directory / "users")
    account.give(directory / "config")
    owner = {"user": account.entry.pw_uid, "group": account.entry.pw_gid} if account.entry else {}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [PGBOUNCER, str(directory / "config")], stdout=log, stderr=log, cwd="/", **owner
        )
    url = database_url(host="127.0.0.1", port=port)
    try:
        until(lambda: process.poll() is not None or answers(url), "the pooler answers")
        assert process.poll() is None, (directory / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait(30)
        shutil.rmtree(directory)


def answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def test_it_works_behind_a_pooler(
    start: Callable[..., Worker], queue: Queue, witness: Witness, pooled: str
) -> None:
    """With `WAKEUP = "poll"` and Django's setting for poolers, `DISABLE_SERVER_SIDE_CURSORS`."""
    worker = start(
        *("--processes", 2, "--threads", 2),
        url=pooled,
        mq={"WAKEUP": "poll", "POLL_INTERVAL": 0.3},
        database={"DISABLE_SERVER_SIDE_CURSORS": True},
    )
    worker.has_started(2)
    names = [f"m{n}" for n in range(200)]
    witness.open("open")
    queue.send("write", *names[:120])
    queue.send("call", *names[120:160], gate="open")
    queue.send("acall", *names[160:], gate="open")
    queue.send("hang", "slow", until=2)
    queue.send("fail", "failing", until=3)
    queue.wait_empty(worker)
    assert queue.done() == dict.fromkeys([*names, "slow", "failing"], 1)
    assert {n: a for n, a, _ in queue.effects() if a != 1} == {"slow": 2, "failing": 3}
    assert "database lost" not in worker.said()
    assert worker.said().count("Traceback") == 2, "of the handler that fails twice"
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.thorough
def test_orders_of_operators_arrive_behind_a_pooler(
    start: Callable[..., Worker], queue: Queue, pooled: str
) -> None:
    """Orders come with the heartbeat, so within ten seconds."""
    worker = start(
        url=pooled,
        mq={"WAKEUP": "poll", "POLL_INTERVAL": 0.3},
        database={"DISABLE_SERVER_SIDE_CURSORS": True},
    )
    worker.until(queues.workers, "its heartbeat")
    [process] = queues.workers()
    queues.quiet_workers(process.id)
    worker.until(lambda: queues.workers()[0].quiet, "it is quiet")
    [waits] = queue.send("write", "a")
    assert "quiet" in str(queues.why(waits))
    queues.resume_workers(process.id)
    queue.wait_empty(worker)
    queues.stop_workers(process.id)
    assert worker.ends() == 0


@pytest.mark.thorough
def test_a_worker_that_listens_through_a_transaction_pooler_is_degraded(
    start: Callable[..., Worker], queue: Queue, witness: Witness, pooled: str
) -> None:
    """Guarantee 7: LISTEN succeeds there, and nothing arrives."""
    worker = start(
        url=pooled,
        mq={"POLL_INTERVAL": 0.3},
        database={"DISABLE_SERVER_SIDE_CURSORS": True},
    )
    worker.until(lambda: [w.wakeup for w in queues.workers()] == ["degraded"], "it is deaf")
    witness.open("open")
    queue.send("write", "a", gate="open")
    queue.wait_empty(worker)


@pytest.mark.slow
def test_a_listener_takes_the_last_session_of_a_pooler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it hears cannot be tried then; it listens."""
    with pooler(mode="session", size=1) as url:
        name_alias(url, monkeypatch)
        wakeup = Wakeup()
        listener = Listener("pooler", wakeup, link=Link(), on_command=lambda: None)
        rung = threading.Event()
        monkeypatch.setattr(wakeup, "ring", rung.set)
        try:
            listener.start()
            assert rung.wait(60)
            rung.clear()
            until(lambda: notify() or rung.wait(0.1), "it hears")
            assert not listener.degraded()
        finally:
            listener.stop()
            listener.join(30)
            assert not listener.is_alive()


def test_doctor_finds_settings_left_in_sessions_of_a_pooler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D016: the limit is not the login's, so ALTER ROLE would not change it."""
    with handlers.isolated(), pooler(mode="transaction", size=1) as url:
        handler("a.b", name="long", timeout=900)(print)
        name_alias(url, monkeypatch)
        assert list(limits("pooler")) == []
        with psycopg.connect(url, autocommit=True) as program:
            program.execute("set statement_timeout = '10min'; set lock_timeout = 200")
        [found] = limits("pooler")
    assert found.id == "D016"
    assert "left lock_timeout = 200ms, statement_timeout = 10min" in found.text
    assert "RECONNECT" in found.hint
    assert "ALTER ROLE" not in found.hint


def name_alias(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the alias "pooler" lead to `url`."""
    here = connections["default"].settings_dict
    place = {"HOST": "127.0.0.1", "PORT": psycopg.conninfo.conninfo_to_dict(url)["port"]}
    monkeypatch.setitem(connections.settings, "pooler", {**here, **place})


def notify() -> None:
    with second_connection() as other:
        other.execute("notify django_mq")
