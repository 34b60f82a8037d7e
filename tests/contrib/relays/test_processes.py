"""Relays and inboxes as users run them: as processes, which are stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from django_mq import Message, broadcast_many
from django_mq.contrib.relays import relay
from django_mq.models import QueuedMessage
from django_mq.supervisor.child import OUT_OF_TIME
from tests.acceptance.conftest import database_url
from tests.acceptance.test_health import ask
from tests.contrib.relays.brokers import Broker, kinds
from tests.ports import free_port
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import proxy as proxy
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parents[3]
NOWHERE = {"kind": "webhook", "url": "http://127.0.0.1:9/"}
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `manage.py` with arguments and settings; killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, url: str = "", **settings: Any) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "DATABASE_URL": url or database_url(),
            "DJANGO_SETTINGS_MODULE": "tests.contrib.relays.project",
            "RELAYS_MQ": json.dumps({"RELAYS": {"events": NOWHERE}, **settings}),
        }
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "manage.py", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def has_stored(count: int) -> bool:
    return QueuedMessage.objects.count() >= count


@pytest.mark.parametrize("broker", kinds("redis", "webhook"), indirect=True, scope="module")
@pytest.mark.parametrize("outage", [True, *slow(False)])
def test_a_worker_ends_cleanly_with_open_connections(
    broker: Broker, place: str, start: Start, tmp_path: Path, outage: bool
) -> None:
    relay("shop.#", to="events")
    destination = broker.destination(place)
    worker = start("mq_worker", RELAYS={"events": destination})
    with transaction.atomic():
        broadcast_many([Message(place, {"n": n}) for n in range(50)])
    broker.received(place, 50)
    until(lambda: not QueuedMessage.objects.exists(), "all are acked")
    if outage:
        broker.refuse(True)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    broker.refuse(False)
    said = (tmp_path / "log").read_text()
    assert "worker" in said
    for word in ("Traceback", "Exception", "was destroyed", "relay_away", "ERROR"):
        assert word not in said, said


@pytest.mark.parametrize(
    "broker", kinds("redis", without=("webhook",)), indirect=True, scope="module"
)
def test_messages_of_a_killed_consumer_are_stored_once(
    broker: Broker, place: str, start: Start, tmp_path: Path
) -> None:
    inbox = {"kind": broker.kind, "url": broker.url, "source": place, "batch_size": 10}
    if broker.kind == "kafka":
        inbox["config"] = {"session.timeout.ms": 6000}  # till the group lets go of a dead member
    for n in range(60):
        broker.publish(place, b"[%d]" % n, id=str(n))
    log = tmp_path / "log"

    def have_started(count: int) -> bool:
        return log.read_text().count("consuming shop") == count

    for number, enough in enumerate((1, 30), 1):
        consumer = start("mq_consume", "crm", INBOXES={"crm": inbox})
        until(partial(have_started, number), "it consumes")
        until(partial(has_stored, enough), "some are stored")
        os.killpg(consumer.pid, signal.SIGKILL)
        consumer.wait(60)
    consumer = start("mq_consume", "crm", INBOXES={"crm": inbox})
    if broker.kind == "redis":  # entries of the dead consumers are taken over after a minute
        found = {tuple(each) for each in QueuedMessage.objects.values_list("unique_id")}
        assert len(found) == QueuedMessage.objects.count()
    else:
        until(partial(has_stored, 60), "all are stored")
        numbers = [each.payload[0] for each in QueuedMessage.objects.all()]
        assert sorted(numbers) == list(range(60))
    until(partial(have_started, 3), "the last one consumes")
    consumer.send_signal(signal.SIGTERM)
    assert consumer.wait(60) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("broker", ["redis"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("drain_seconds", "signals", "codes"),
    [
        (0.2, [signal.SIGTERM], {OUT_OF_TIME}),
        *slow((60, [signal.SIGTERM, signal.SIGINT], {128 + signal.SIGTERM, 128 + signal.SIGINT})),
    ],
)
def test_a_consumer_ends_in_time_whatever_hangs(
    broker: Broker,
    place: str,
    start: Start,
    tmp_path: Path,
    proxy: Proxy,
    drain_seconds: float,
    signals: list[signal.Signals],
    codes: set[int],
) -> None:
    inbox = {"kind": broker.kind, "url": broker.url, "source": place}
    broker.publish(place, b"{}", id="1")
    proxy.hold_at("django_mq_queuedmessage")
    consumer = start(
        "mq_consume",
        "crm",
        url=database_url(host="127.0.0.1", port=proxy.port),
        INBOXES={"crm": inbox},
        DRAIN_SECONDS=drain_seconds,
    )
    until(proxy.is_holding, "its statement hangs")
    for each in signals:
        consumer.send_signal(each)
    assert consumer.wait(60) in codes
    said = (tmp_path / "log").read_text()
    assert ("not stopped within 2 s" in said) == (codes == {OUT_OF_TIME})
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "broker", kinds("redis", without=("webhook",)), indirect=True, scope="module"
)
def test_an_idle_consumer_ends_well_without_time_to_drain(
    broker: Broker, place: str, start: Start, tmp_path: Path
) -> None:
    """A busy machine may not wake it within the two seconds that it has, so it has three tries."""
    inbox = {"kind": broker.kind, "url": broker.url, "source": place}

    def ended(start_number: int) -> int:
        consumer = start("mq_consume", "crm", INBOXES={"crm": inbox}, DRAIN_SECONDS=0)
        until(lambda: (tmp_path / "log").read_text().count("consuming shop") == start_number)
        consumer.send_signal(signal.SIGTERM)
        return consumer.wait(60)

    assert any(ended(number) == 0 for number in (1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis"], indirect=True, scope="module")
def test_probes_hear_whether_a_consumer_waits_for_its_broker(
    broker: Broker, place: str, start: Start
) -> None:
    inbox = {"kind": broker.kind, "url": broker.url, "source": place}
    port = free_port()
    consumer = start("mq_consume", "crm", "--health-port", str(port), INBOXES={"crm": inbox})
    until(lambda: ask(port, "/readyz") == (200, b"ok\n"), "it is ready")
    broker.refuse(True)
    away = (503, b"it waits for the broker\n")
    until(lambda: ask(port, "/readyz") == away, "it says what it waits for")
    assert ask(port, "/livez") == (200, b"ok\n")
    broker.refuse(False)
    until(lambda: ask(port, "/readyz") == (200, b"ok\n"), "it is ready again")
    consumer.send_signal(signal.SIGTERM)
    assert consumer.wait(60) == 0
    assert ask(port, "/livez")[0] == 0


@pytest.mark.slow
def test_consumer_names_a_taken_port(start: Start, tmp_path: Path) -> None:
    inbox = {"kind": "redis", "url": "redis://127.0.0.1:9", "source": "s"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        consumer = start("mq_consume", "crm", "--health-port", port, INBOXES={"crm": inbox})
        assert consumer.wait(60) == 1
    assert f"health port {port} cannot be opened" in (tmp_path / "log").read_text()
