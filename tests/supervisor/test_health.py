"""A client of the health endpoint must not block the supervisor for long."""

from __future__ import annotations

import itertools

import pytest

from django_mq.supervisor import health


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
