"""Links that hang, neither closed nor answered: every wait of the worker has a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import connection, connections

from django_mq import handler
from django_mq.executor import session
from django_mq.executor import watchdog as watchdog_module
from django_mq.executor.connections import driver_connection, plain_connection
from django_mq.executor.scoreboard import MonitoredPart, Scoreboard
from django_mq.executor.watchdog import TICK, Link
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, WorkerHeartbeat
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.supervisor.readiness import Readiness
from django_mq.worker import liveness
from django_mq.worker.parts import Parts
from tests.database import second_connection, until_alone
from tests.rows import add
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, Said, effect, effects, proxied, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "TICK", 0.05)


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {getattr(record, "event", "") for record in list(caplog.records)}


def parts_of(running: Running) -> Parts:
    until(lambda: running.worker._run)
    run = running.worker._run
    assert run is not None
    return run.parts


def bound(parts: Parts, seconds: float) -> None:
    """Limit the waits on the existing links to this time; new links have the default."""
    for link in parts.watchdog._links:
        link.seconds = seconds


@pytest.fixture
def through(proxy: Proxy) -> Iterator[Proxy]:
    with proxied(proxy):
        yield proxy
        proxy.hold(False)
        connections["default"].close()


# ---- a link


def test_a_wait_ends_after_its_bound(through: Proxy) -> None:
    with connected(through) as driver:
        link = Link(3 * TICK)
        link.attach(driver)
        driver.execute("select 1")
        assert (link.waits, link.answers) == (1, 1)
        through.hold(True)
        with ticking(link), pytest.raises(psycopg.OperationalError, match="stalled"):
            driver.execute("select 1")
        assert (link.waits, link.answers) == (2, 1)
        assert driver.closed


def test_only_a_wait_is_ended(through: Proxy) -> None:
    """Idle connections, those in use by a handler, and those that get answers are left alone."""
    with connected(through) as driver:
        link = Link(0.0)
        link.attach(driver)
        for _ in range(5):
            link.tick()
        link.in_handler = True
        with ticking(link):
            driver.execute("select pg_sleep(0.3)")
        link.in_handler = False
        for _ in range(20):
            driver.execute("select 1")
            link.tick()
        assert not driver.closed


def test_the_probe_of_a_silent_connection_has_a_short_limit(
    through: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that comes after a quiet time must not wait for as long as a statement may take."""
    monkeypatch.setattr(session, "STALE_AFTER", -1.0)
    monkeypatch.setattr(session, "PROBE_SECONDS", 3 * TICK)
    link = Link()
    of_executor = session.Session(plain_connection("default", link), link=link)
    of_executor.connect()
    through.freeze()
    began = monotonic()
    with ticking(link), pytest.raises(psycopg.OperationalError, match="stalled"):
        of_executor.check_silent()
    assert monotonic() - began < link.seconds / 2
    assert link.seconds == Link().seconds
    of_executor.close()
    of_executor.check_silent()  # on a new connection
    of_executor.close()


@pytest.mark.parametrize(("options", "kept"), [({}, ("30", "30")), ({"idle": 7}, ("7", "30"))])
def test_an_idle_connection_is_kept_alive(
    through: Proxy, options: dict[str, int], kept: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a load balancer or firewall forgets it after some minutes."""
    settings = connections["default"].settings_dict
    own = {f"keepalives_{name}": value for name, value in options.items()}
    monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **own})
    with closing(driver_connection("default", Link())) as driver:
        params = driver.info.get_parameters()
    assert (params["keepalives_idle"], params["keepalives_interval"]) == kept


def test_the_keepalives_of_a_service_file_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = connections["default"].settings_dict
    params = connections["default"].get_connection_params()
    names = ("host", "port", "dbname", "user", "password")
    lines = [f"{name}={params[name]}" for name in names if params.get(name)]
    file = tmp_path / "services"
    file.write_text("\n".join(["[shop]", *lines, "keepalives_idle=7", ""]))
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], "service": "shop"})
    with closing(driver_connection("default", Link())) as driver:
        assert driver.info.get_parameters()["keepalives_idle"] == "7"


def connected(proxy: Proxy) -> psycopg.Connection[Any]:
    params = connection.get_connection_params()
    return psycopg.connect(
        dbname=params["dbname"],
        user=params["user"],
        password=params.get("password"),
        host="127.0.0.1",
        port=proxy.port,
        autocommit=True,
    )


class ticking:
    """Tick a link during the block, like the watchdog."""

    def __init__(self, link: Link) -> None:
        self._link, self._enough = link, threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        while not self._enough.wait(0.02):
            self._link.tick()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        self._enough.set()
        self._thread.join()


# ---- a worker


def test_idle_worker_notices_and_reconnects(
    start: Start, said: Said, through: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The claims, the renewals, and LISTEN."""
    caplog.set_level(logging.INFO, logger="django_mq")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    running = start()
    parts = parts_of(running)
    assert parts.listener is not None
    until(lambda: parts.listener.steps > 2, "it listens")  # type: ignore[union-attr]
    through.hold(True)
    bound(parts, 0.2)
    until(lambda: "database_lost" in events(caplog))
    assert "stalled" in caplog.text
    parts.listener._link.shut()  # its next ping would be seconds away
    until(parts.listener.degraded)
    through.hold(False)
    until(lambda: not parts.listener.degraded())  # type: ignore[union-attr]
    message = add(handler="h")
    said.wait("message_acked")
    assert "database_back" in events(caplog)
    assert running.stop()
    assert effects() == {message.pk}


def test_listen_is_pinged(
    start: Start, said: Said, through: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that only listens sends nothing, so only a ping can show that it hangs."""
    monkeypatch.setattr("django_mq.worker.listener.PING_INTERVAL", 0.1)
    running = start()
    parts = parts_of(running)
    assert parts.listener is not None
    answers = parts.listener._link.answers
    until(lambda: parts.listener._link.answers > answers + 2)  # type: ignore[union-attr]
    shut: list[float] = []
    link = parts.listener._link
    monkeypatch.setattr(link, "shut", lambda: shut.append(link.seconds))
    through.hold(True)
    until(lambda: shut)
    assert shut[0] == 0.1
    monkeypatch.undo()
    through.hold(False)
    assert running.stop()


@pytest.mark.parametrize("uses", [False, True], ids=["by-fence", "in-its-transaction"])
def test_a_settle_whose_answer_does_not_come(
    start: Start, said: Said, through: Proxy, uses: bool
) -> None:
    gate, entered = threading.Event(), threading.Event()
    seen: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if uses:
            effect(delivery)
        seen.append(delivery.attempt)
        entered.set()
        assert gate.wait(PATIENCE * 4)

    message = add(handler="h")
    running = start()
    parts = parts_of(running)
    assert entered.wait(PATIENCE)
    through.hold_at("delete from django_mq_queuedmessage")
    link = parts.executors[0]._link
    link.seconds = 0.2
    gate.set()
    until(lambda: link._was_shut)
    through.hold(False)
    until(lambda: not waiting())
    assert running.stop()
    assert effects() == ({message.pk} if uses else set())
    assert set(seen) == {1}
    assert FailedAttempt.objects.count() == 0


def test_a_handlers_own_statement_is_not_bounded(start: Start, said: Said) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select pg_sleep(1)")

    @handler("#", queue="mail", name="call", atomic=False)
    def call(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute("select pg_sleep(1)")

    running = start()
    parts_of(running).executors[0]._link.seconds = 0.3
    add(handler="h")
    add(handler="call")
    said.wait("message_acked", 2)
    assert running.stop()
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("held", ["running", *slow("idle")])
def test_a_drain_ends_whatever_the_link_does(
    start: Start, said: Said, through: Proxy, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """Only the drain ends these waits: the time limits of statements are an hour here."""
    monkeypatch.setattr("django_mq.worker.shutdown.STATEMENT_SECONDS", 0.5)
    gate, entered = threading.Event(), threading.Event()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        entered.set()
        assert gate.wait(PATIENCE * 4)

    running = start(drain_seconds=2.0)
    parts = parts_of(running)
    if held == "running":
        add(handler="h")
        assert entered.wait(PATIENCE)
    else:
        said.wait("worker_started")
    through.hold(True)
    bound(parts, 3600.0)
    until(lambda: parts.statements.link._waiting)
    assert running.stop() is (held == "idle")
    gate.set()
    through.hold(False)
    for executor in parts.executors:
        executor.join(PATIENCE)
    # A statement that the proxy held may arrive after the worker's links are shut.
    connection.close()
    until_alone()


# ---- the supervisor's view


def test_stalled_loop_is_reported(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setattr(liveness, "MIN_STALL_SECONDS", 1.0)
    settings.DJANGO_MQ = {"POLL_INTERVAL": 0.1, "LEASE": 1.0}
    board = Scoreboard(200)
    running = start(scoreboard=board)
    parts = parts_of(running)
    gate, fetch = threading.Event(), parts.fetcher.fetch

    def stuck(cursor: Any) -> float:
        assert gate.wait(PATIENCE * 4)
        return fetch(cursor)

    monkeypatch.setattr(parts.fetcher, "fetch", stuck)
    until(lambda: board.progresses(MonitoredPart.DATABASE))
    slot = ProcessSlot(board, pid=1)
    # On a busy machine the renewals may be late, too, but not for good.
    until(lambda: Readiness([slot]).not_live() == ["worker process 1: the loop is stalled"])
    assert Readiness([slot], draining=True).not_live() == []
    gate.set()
    until(lambda: MonitoredPart.LOOP not in board.stalled())
    assert running.stop()


def test_a_worker_whose_heartbeats_are_refused_is_alive_and_not_ready(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Commands do not reach it, and to the fleet it is gone."""
    monkeypatch.setattr(liveness, "MIN_STALL_SECONDS", 1.0)
    settings.DJANGO_MQ = {"LEASE": 1.0}
    board = Scoreboard(200)
    slot = ProcessSlot(board, pid=1)
    running = start(scoreboard=board)
    until(lambda: WorkerHeartbeat.objects.exists())
    until(lambda: Readiness([slot]).not_ready() == [])
    with refused_heartbeats():
        refused = ["worker process 1: the database refuses its heartbeats"]
        until(lambda: Readiness([slot]).not_ready() == refused)
        until(lambda: Readiness([slot]).not_live() == [])
    until(lambda: Readiness([slot]).not_ready() == [])
    assert running.stop()


@contextmanager
def refused_heartbeats() -> Iterator[None]:
    """A trigger of the project refuses them."""
    with connection.cursor() as cursor:
        cursor.execute(
            "create function refuse() returns trigger language plpgsql"
            " as $$ begin raise 'no'; end $$;"
            "create trigger refuse before insert or update on django_mq_workerheartbeat"
            " for each row execute function refuse()"
        )
        try:
            yield
        finally:
            cursor.execute("drop function refuse cascade")


def test_part_that_has_not_begun_is_not_stalled() -> None:
    board = Scoreboard(1)
    assert board.stalled() == []
    board.record_progress(MonitoredPart.RENEWAL, -1.0)
    board.record_progress(MonitoredPart.LOOP, 60.0)
    assert board.stalled() == [MonitoredPart.RENEWAL]
    board.add_claimed(3)
    board.wipe()
    assert board.stalled() == []
    assert board.claimed == 3


def test_another_session_is_unharmed(through: Proxy) -> None:
    """The number of a closed socket may belong to another connection by now."""
    with connected(through) as driver:
        link = Link()
        link.attach(driver)
    with second_connection() as other:
        link.shut()
        assert other.execute("select 1").fetchone() == (1,)
