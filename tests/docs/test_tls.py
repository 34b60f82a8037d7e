"""docs/deploy/index.md: with these OPTIONS, only a server with a verified certificate is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
import pytest_django
from django.core.management import CommandError, call_command
from django.db import connections

from django_mq.executor.watchdog import Link
from django_mq.worker.listener import Listener
from django_mq.worker.wakeup import Wakeup
from tests.docs.pages import DOCS
from tests.test_docs import snippets


@contextmanager
def server(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the port of a server that so answers the request for TLS, and what it is told then."""
    told: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                link, _ = listening.accept()
                with link:
                    assert link.recv(8)[4:] == b"\x04\xd2\x16\x2f"  # SSLRequest
                    link.sendall(answer)
                    told.append(link.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1], told
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "refused"),
    [(b"N", "server does not support SSL"), (b"S", "root certificate file .* does not exist")],
    ids=["without TLS", "of an unknown authority"],
)
def test_nothing_is_sent_before_the_certificate_is_verified(
    answer: bytes,
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
    django_db_blocker: pytest_django.DjangoDbBlocker,
) -> None:
    """S28."""
    [code] = snippets(DOCS / "deploy/index.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    default = {**connections.settings["default"], **names["DATABASES"]["default"]}
    with server(answer) as (port, told), django_db_blocker.unblock():
        there = {**default, "HOST": "127.0.0.1", "PORT": port}
        monkeypatch.setitem(connections.settings, "there", there)
        with pytest.raises(psycopg.OperationalError, match=refused):
            connections.create_connection("there").connect()
        with pytest.raises(CommandError, match=f"'there' cannot be used: .*{refused}"):
            call_command("mq_worker", "--database", "there")
        with pytest.raises(psycopg.OperationalError, match=refused):
            Listener("there", Wakeup(), link=Link(), on_command=lambda: None)._listen()
    del connections["there"]
    assert told
    assert set(told) == {b""}
