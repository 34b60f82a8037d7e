"""A server restarts, refuses work, or is replaced: workers recover by themselves."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator

import psycopg
import pytest

from django_mq.store import server_facts
from testproject.embedded.server import PORT, Server
from tests.acceptance.app.witness import Witness
from tests.acceptance.private import done, look, running, send, standby_of, url_of
from tests.acceptance.processes import Worker

CUT = """
select pg_terminate_backend(pid) from pg_stat_activity
 where backend_type = 'client backend' and pid <> pg_backend_pid()
"""
WAITING_COMMITS = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
HEARTBEATS = "select count(*) from django_mq_workerheartbeat"
BROADCAST = """
select mq_broadcast('work', 'acceptance.write', jsonb_build_object('name', name))
  from unnest(%s::text[]) as name
"""
#: Each way to refuse work: the statements that begin and end it, and the worker's words for it.
TROUBLES = {
    "read-only": (
        "alter role worker set default_transaction_read_only = on",
        "alter role worker reset default_transaction_read_only",
        "read only",
    ),
    "no-connection-free": (
        "alter role worker connection limit 0",
        "alter role worker connection limit -1",
        "too many connections for role",
    ),
    "no-login": (
        "alter role worker nologin",
        "alter role worker login",
        "is not permitted to log in",
    ),
}


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.mark.thorough
def test_a_server_in_trouble(
    start: Callable[..., Worker], server: Server, witness: Witness
) -> None:
    """Guarantees 1, 16: no process dies, and every effect is there once."""
    look(server, "create role worker login", rows=False)
    look(server, "grant all on all tables in schema public to worker", rows=False)
    send(server, "write", "first")
    worker = start("--threads", 2, url=url_of(server).replace("postgres@", "worker@"))
    worker.until(lambda: done(server) == ["first"], "it works")
    names = ["first"]
    for trouble, (begin, end, words) in TROUBLES.items():
        send(server, "gate", f"during-{trouble}", gate=trouble)
        worker.until(lambda name=trouble: witness.started(f"during-{name}"), "one runs")
        said = len(worker.said())
        look(server, begin, rows=False)
        look(server, CUT)
        witness.open(trouble)
        worker.until(
            lambda said=said, words=words: re.search(
                f"database lost .*{words}", worker.said()[said:]
            ),
            "it says so",
        )
        look(server, end, rows=False)
        send(server, "write", f"after-{trouble}")
        names += [f"during-{trouble}", f"after-{trouble}"]
        worker.until(lambda names=names: done(server) == sorted(names), f"all after {trouble}")
    server.control("stop", "-m", "fast")
    server.start()
    send(server, "write", "last")
    worker.until(lambda: done(server) == sorted([*names, "last"]), "all after the restart")
    charged = look(server, "select attempt from django_mq_failedattempt")
    assert charged == [(1,)] * len(TROUBLES), "those whose transaction was cut, once each"
    assert len(worker.children()) == 1
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.thorough
def test_a_login_with_too_few_connections(
    start: Callable[..., Worker], server: Server, witness: Witness
) -> None:
    """The threads that have one work. The log says what to do, and does not take it back."""
    look(server, "create role worker login connection limit 4", rows=False)
    look(server, "grant all on all tables in schema public to worker", rows=False)
    names = [f"m{n}" for n in range(3)]
    send(server, "gate", *names, gate="open")
    worker = start("--threads", 3, url=url_of(server).replace("postgres@", "worker@"))
    worker.says("too many connections for role .worker.; lower --proc.*; trying again in 2 s")
    assert "database is back" not in worker.said()
    look(server, "alter role worker connection limit -1", rows=False)
    witness.open("open")
    worker.until(lambda: done(server) == names, "all are done")
    worker.says("database is back")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.thorough
def test_a_failover(start: Callable[..., Worker], server: Server, witness: Witness) -> None:
    """Guarantee 1: with a synchronous standby nothing is lost, and no effect comes twice."""
    with standby_of(server) as standby:
        send(server, "gate", "during", gate="open")
        send(server, "write", *[f"m{n:02}" for n in range(20)])
        both = {
            "HOST": f"{server.sockets},{standby.sockets}",
            "PORT": f"{PORT},{PORT}",
            "OPTIONS": {"target_session_attrs": "read-write"},
        }
        worker = start("--threads", 2, url=url_of(server), database=both)
        worker.until(lambda: witness.started("during") and len(done(server)) >= 10, "it works")
        server.control("stop", "-m", "immediate")
        standby.control("promote")
        witness.open("open")
        send(standby, "write", "after")
        worker.until(lambda: len(done(standby)) >= 22, "all are done")
        assert done(standby) == ["after", "during", *[f"m{n:02}" for n in range(20)]]
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0


@pytest.mark.thorough
def test_a_standby(start: Callable[..., Worker], server: Server) -> None:
    """A worker does not start on a standby. One that runs waits there until it is promoted."""
    with standby_of(server) as standby:
        worker = start(url=url_of(standby))
        assert worker.ends() == 1
        assert "cannot be used: The server is a standby, which is read only" in worker.said()
        worker = start(database={"HOST": f"{server.sockets},{standby.sockets}"}, url=url_of(server))
        worker.has_started(1)
        server.control("stop", "-m", "immediate")
        worker.says("database lost .the server is read only, as a standby is: ")
        standby.control("promote")
        send(standby, "write", "after")
        worker.until(lambda: done(standby) == ["after"], "it goes on by itself")
        assert worker.said().count("database is back") == 1
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0


@pytest.mark.thorough
def test_a_standby_that_is_away(start: Callable[..., Worker], server: Server) -> None:
    """Every COMMIT hangs, so all leases lapse. No message is charged, and the worker drains."""
    names = [f"m{n:02}" for n in range(50)]
    with standby_of(server) as standby:
        worker = start("--processes", 2, url=url_of(server), mq={"LEASE": 3, "DRAIN_SECONDS": 5})
        worker.until(lambda: look(server, HEARTBEATS) == [(2,)], "both have a heartbeat")
        with psycopg.connect(url_of(server), autocommit=True) as producer:
            producer.execute("set synchronous_commit = local")
            standby.control("stop", "-m", "immediate")
            producer.execute(BROADCAST, [names])
        worker.says("the COMMIT of an earlier heartbeat still waits")
        worker.says("database lost .connection stalled")  # the claim
        with psycopg.connect(url_of(server)) as session, session.cursor() as cursor:
            assert server_facts.waiting_commits(cursor, older_than=0.0)[0] > 0
        standby.start()
        worker.until(lambda: done(server) == names, "all are done")
        assert look(server, "select distinct attempt from acceptance_effect") == [(1,)]
        worker.until(lambda: look(server, WAITING_COMMITS) == [(0,)], "no COMMIT waits")
        standby.control("stop", "-m", "immediate")
        worker.tell(signal.SIGTERM)
        assert worker.ends() in (0, 5)
