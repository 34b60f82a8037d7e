"""A command without a supervisor is stopped by signals, and says how it is."""

from __future__ import annotations

import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from django_mq.supervisor.attended import attended
from django_mq.supervisor.health import Endpoint
from django_mq.supervisor.reporter import Reporter
from django_mq.supervisor.service import Service
from tests.supervisor.test_service import heard, unit
from tests.waiting import until


class Work:
    name = "crm"

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.stalled: list[str] = []
        self.waits: list[str] = []

    def stop(self) -> None:
        self.stopped.set()

    def not_live(self) -> list[str]:
        return self.stalled

    def not_ready(self) -> list[str]:
        return self.waits


def reporter_of(health: Endpoint | None = None, service: Service | None = None) -> Reporter:
    return Reporter(health=health, metrics=None, service=service)


def ask(endpoint: Endpoint, path: str) -> tuple[int, str]:
    port = endpoint._socket.getsockname()[1]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_report_stalled_and_waiting_parts() -> None:
    work, health = Work(), Endpoint(0, "127.0.0.1")
    with attended(work, reporter_of(health=health), seconds=60):
        assert ask(health, "/livez") == ask(health, "/readyz") == (200, "ok\n")
        assert ask(health, "/other")[0] == 404
        work.waits = ["it waits for the broker"]
        assert ask(health, "/livez") == (200, "ok\n")
        assert ask(health, "/readyz") == (503, "it waits for the broker\n")
        work.stalled = ["the inbox is stalled"]
        assert ask(health, "/livez") == (503, "the inbox is stalled\n")
        assert ask(health, "/readyz") == (503, "the inbox is stalled\nit waits for the broker\n")
        work.stalled = work.waits = []
        os.kill(os.getpid(), signal.SIGTERM)
        assert work.stopped.wait(60)
        assert ask(health, "/livez") == (200, "ok\n")
        assert ask(health, "/readyz") == (503, "draining\n")
    with pytest.raises(OSError, match="Bad file descriptor"):
        health._socket.getsockname()


def test_unit_is_notified_without_a_client(tmp_path: Path) -> None:
    work, address = Work(), str(tmp_path / "notify")
    with unit(address) as link:
        service = Service.of_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2"})
        work.waits = ["it has not looked yet"]
        with attended(work, reporter_of(service=service), seconds=60):
            assert link.recv(100) == b"WATCHDOG=1"
            work.waits = []
            until(lambda: link.recv(100) == b"READY=1")
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: link.recv(100) == b"STOPPING=1")
            assert work.stopped.is_set()


def test_unit_is_notified_of_work_that_ends_by_itself(tmp_path: Path) -> None:
    """As with `--until-empty`, or after an error."""
    address = str(tmp_path / "notify")
    with unit(address) as link:
        with attended(Work(), reporter_of(service=Service(address)), seconds=60):
            assert link.recv(100) == b"READY=1"
        assert heard(link) == [b"STOPPING=1"]


def test_without_probes_and_signals_it_only_ends() -> None:
    work = Work()
    with attended(work, reporter_of(), seconds=0):
        pass
    assert not work.stopped.is_set()
