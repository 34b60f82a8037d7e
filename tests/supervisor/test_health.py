"""A client of the health endpoint must not block the supervisor for long."""

from __future__ import annotations

import itertools
import resource
import socket

import pytest

from django_mq.supervisor import health
from django_mq.supervisor.descriptors import wait_ready
from django_mq.supervisor.readiness import Readiness
from django_mq.supervisor.reporter import Reporter
from tests.waiting import SOON


class Trickle:
    """A client that sends its request byte by byte."""

    sent = 0

    def settimeout(self, seconds: float) -> None: ...

    def recv(self, size: int) -> bytes:
        self.sent += 1
        return b"x"


def test_a_client_that_sends_byte_by_byte_gets_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte came in time, so 8,192 of them held up the supervisor for seconds."""
    clock = itertools.count(1000.0, health.CLIENT_SECONDS / 10)
    monkeypatch.setattr(health, "monotonic", lambda: next(clock))
    client = Trickle()
    with pytest.raises(TimeoutError):
        health._request(client)  # type: ignore[arg-type]
    assert client.sent <= 10


def test_without_descriptors_a_waiting_client_does_not_make_the_supervisor_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be accepted, so the port stays readable."""
    now = health.monotonic()
    monkeypatch.setattr(health, "monotonic", lambda: now)
    endpoint = health.Endpoint(0, "127.0.0.1")
    reporter = Reporter(health=endpoint, metrics=None, service=None)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.create_connection(endpoint._socket.getsockname()):
            assert wait_ready(reporter.descriptors(), seconds=SOON)[0] == {endpoint.fileno()}
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
            reporter.answer({endpoint.fileno()}, Readiness([]))
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            assert reporter.descriptors() == []
            now += health.REST_SECONDS
            assert wait_ready(reporter.descriptors(), seconds=SOON)[0] == {endpoint.fileno()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        endpoint.close()
