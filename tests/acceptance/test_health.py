"""The health endpoint: for probes, on the loopback, and silent about the queues. S27."""

from __future__ import annotations

import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from django.db import connection

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import HURRIED, Queue, database_url
from tests.acceptance.processes import SOON, Worker
from tests.ports import free_port
from tests.supervisor.test_service import heard, unit
from tests.worker.proxy import Proxy


def ask(port: int, path: str, address: str = "127.0.0.1") -> tuple[int, bytes]:
    """Return the status and the body; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except urllib.error.URLError:
        return 0, b""


def test_live_ready_and_draining(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    port = free_port()
    worker = start("--health-port", port)
    queue.send("gate", "secret-name", gate="open")
    worker.until(witness.started, "it runs")
    assert ask(port, "/livez") == (200, b"ok\n")
    assert ask(port, "/readyz?probe=1") == (200, b"ok\n")
    assert ask(port, "/secret-name")[0] == 404
    worker.tell(signal.SIGTERM)
    worker.says("draining")
    assert ask(port, "/livez") == (200, b"ok\n")
    assert ask(port, "/readyz") == (503, b"draining\n")
    witness.open("open")
    assert worker.ends() == 0
    assert ask(port, "/livez")[0] == 0


def test_it_listens_on_the_address_that_is_named(start: Callable[..., Worker]) -> None:
    port = free_port()
    worker = start("--health-port", f"127.0.0.2:{port}")
    worker.has_started(1)
    worker.until(lambda: ask(port, "/livez", "127.0.0.2") == (200, b"ok\n"), "it answers")
    assert ask(port, "/livez")[0] == 0
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.slow
def test_slow_clients_keep_it_from_nothing(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Guarantee 23, S27: a client sends a request byte by byte, and handlers still end in time."""
    port = free_port()
    worker = start("--health-port", port)
    worker.has_started(1)
    with dripping(port), dripping(port):
        queue.send("hang", "slow", until=2)
        queue.wait_empty(worker)
        assert ask(port, "/livez") == (200, b"ok\n")
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0


@contextmanager
def dripping(port: int) -> Iterator[None]:
    """Send an endless request, and start again when it is cut."""
    enough = threading.Event()

    def drip() -> None:
        while not enough.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as client:
                while not enough.wait(0.05):
                    client.sendall(b"x")
            enough.wait(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(30)


def test_a_server_that_is_away_makes_it_unready_not_dead(
    start: Callable[..., Worker], empty_tables: None, tmp_path: Path
) -> None:
    """A failing `/livez` would restart the worker in vain. systemd gets the same answer."""
    port, proxy = free_port(), Proxy(connection.get_connection_params())
    with unit(str(tmp_path / "notify")) as link:
        worker = start(
            *("--health-port", port),
            url=database_url(host="127.0.0.1", port=proxy.port),
            NOTIFY_SOCKET=str(tmp_path / "notify"),
            WATCHDOG_USEC="1000000",
        )
        assert link.recv(1000) in (b"READY=1", b"WATCHDOG=1")
        worker.until(lambda: ask(port, "/readyz") == (200, b"ok\n"), "it is ready")
        proxy.refuse(True)
        worker.says("database lost")
        told = worker.until(
            lambda: (answer := ask(port, "/readyz"))[0] == 503 and answer[1], "it is not ready"
        )
        [child] = worker.children()
        text = f"worker process {child}: the database does not answer, or refuses statements\n"
        assert told == text.encode()
        assert ask(port, "/livez") == (200, b"ok\n")
        proxy.refuse(False)
        worker.until(lambda: ask(port, "/readyz") == (200, b"ok\n"), "it is ready again")
        heard(link)
        link.setblocking(True)
        assert link.recv(1000) == b"WATCHDOG=1"
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0
        assert b"STOPPING=1" in heard(link)
    proxy.close()


def test_a_frozen_child_is_named(start: Callable[..., Worker], empty_tables: None) -> None:
    """All its threads stand still; systemd's watchdog would end the worker, too."""
    port = free_port()
    worker = start("--health-port", port, mq={"POLL_INTERVAL": 0.5, "LEASE": 2}, **HURRIED)
    worker.until(lambda: ask(port, "/readyz") == (200, b"ok\n"), "it is ready")
    child = worker.kill_child(0, signal.SIGSTOP)
    told = worker.until(
        lambda: (answer := ask(port, "/livez"))[0] == 503 and answer[1], "it is not live", 2 * SOON
    )
    assert told.splitlines()[0] == f"worker process {child}: the loop is stalled".encode()
    worker.kill_child(0, signal.SIGCONT)
    worker.until(lambda: ask(port, "/livez") == (200, b"ok\n"), "it is live again")
