"""The messages to systemd, over a real datagram socket."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from django_mq.supervisor.service import Service

NO = ["it stands still"]


@contextmanager
def unit(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind("\0" + address[1:] if address.startswith("@") else address)
        link.settimeout(30)
        yield link


def heard(link: socket.socket) -> list[bytes]:
    """Return the messages sent so far."""
    link.setblocking(False)
    words = []
    while True:
        try:
            words.append(link.recv(1000))
        except BlockingIOError:
            return words


@pytest.mark.parametrize("abstract", [False, True])
def test_ready_once_then_the_watchdog_while_live(tmp_path: Path, abstract: bool) -> None:
    address = f"@django_mq-{secrets.token_hex(8)}" if abstract else str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1", "HOME": "/"}
    with unit(address) as link:
        service = Service.of_environment(environment)
        assert service is not None
        assert environment == {"HOME": "/"}
        service.report([], NO)
        assert heard(link) == [b"WATCHDOG=1"]
        service.report([], [])
        service.report(NO, NO)
        service.report([], [])
        assert heard(link) == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        service.stopping()
        assert heard(link) == [b"STOPPING=1"]


def test_watchdog_is_notified_at_half_its_time(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with unit(address) as link:
        service = Service.of_environment(
            {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "7200000000", "WATCHDOG_PID": "0"}
        )
        assert service is not None
        service.report([], [])
        assert heard(link) == [b"READY=1"]  # the watchdog belongs to another process
        service = Service(address, watchdog=3600.0)
        service.report([], NO)
        service.report([], NO)
        assert heard(link) == [b"WATCHDOG=1"]


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_without_a_unit(environment: dict[str, str]) -> None:
    assert Service.of_environment(environment) is None


def test_a_unit_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    Service(os.fspath(tmp_path / "nobody")).stopping()


def test_ready_is_sent_again_if_the_socket_was_full(tmp_path: Path) -> None:
    """systemd may be slow while a machine starts; without it, it would end the worker."""
    address = str(tmp_path / "notify")
    with unit(address) as link, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
        service = Service(address)
        others.setblocking(False)
        others.connect(address)
        with suppress(BlockingIOError):
            while True:
                others.send(b"STATUS=starting")
        service.report([], [])
        heard(link)
        service.report([], [])
        service.report([], [])
        assert heard(link) == [b"READY=1"]
