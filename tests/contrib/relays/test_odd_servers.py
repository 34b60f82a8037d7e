"""A server that is none, or not the one that was meant: a broker that is away, for every client."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_mq.conf import find_errors, get_settings
from django_mq.contrib.relays import relay
from django_mq.contrib.relays.consumer import Consumer
from tests.contrib.relays.conftest import deliver
from tests.contrib.relays.test_kinds import relay_events, send
from tests.rows import the_message
from tests.slow import mostly_slow

pytestmark = pytest.mark.django_db(transaction=True)

#: By scheme, the kind of relay or inbox.
SCHEMES = {
    "amqp": "amqp",
    "amqps": "amqp",
    "nats": "nats",
    "tls": "nats",
    "redis": "redis",
    "rediss": "redis",
    "http": "webhook",
    "https": "webhook",
}


def reset(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def drip(link: socket.socket) -> None:
    """Each byte comes in time, but there is always one more."""
    link.sendall(b"HTTP/1.1 204 No Content\r\nX-Slow: ")
    while True:
        link.sendall(b"x")
        time.sleep(0.2)


#: The odd things that a server may do with an accepted connection.
ODD: dict[str, Callable[[socket.socket], object]] = {
    "closes": socket.socket.close,
    "resets": reset,
    "says nothing": id,
    "talks nonsense": lambda link: link.sendall(b"\x00\xffnonsense\r\n" * 10),
    "speaks HTTP": lambda link: link.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
    "never ends": drip,
}


@contextlib.contextmanager
def address_of(odd: str) -> Iterator[str]:
    """Yield the host and port of an odd server, or of none."""
    if odd == "unknown host":
        yield "broker.invalid"
        return
    if odd == "refuses":
        with socket.socket() as closed:  # bound, so that no other server gets the port
            closed.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{closed.getsockname()[1]}"
        return
    links: list[socket.socket] = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                links.append(link)
                threading.Thread(target=answer, args=(link,), daemon=True).start()

    def answer(link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            ODD[odd](link)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread; close() does not
    for link in links:
        link.close()


SERVERS = [*ODD, "refuses", "unknown host"]


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with address_of(request.param) as address:
        yield address


@pytest.mark.parametrize(
    ("scheme", "address"), mostly_slow([*SCHEMES], SERVERS), indirect=["address"]
)
def test_a_relay_uses_no_attempt(
    scheme: str, address: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"kind": SCHEMES[scheme], "url": f"{scheme}://{address}/", "timeout": 0.3}
    settings.DJANGO_MQ = {"RELAYS": {"events": options}}
    relay("#", to="events")
    send("shop.odd", 1)
    deliver()
    message = the_message()
    assert message.attempts == 0
    assert message.last_error.startswith("Snooze: the broker is away: ")
    assert relay_events(caplog) == ["relay_away"]


WRONG = {
    "amqp": "amqp://guest:guest@127.0.0.1/?heartbeat=abc",
    "redis": "redis://127.0.0.1/?nonsense=1",
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_option_that_the_client_refuses_uses_no_attempt(
    kind: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_MQ = {"RELAYS": {"events": {"kind": kind, "url": WRONG[kind]}}}
    relay("#", to="events")
    send("shop.odd", 1)
    deliver()
    assert the_message().attempts == 0
    assert relay_events(caplog) == ["relay_away"]
    assert "the client refuses its options: " in caplog.text


@pytest.mark.parametrize("kind", WRONG)
def test_an_inbox_with_an_option_that_the_client_refuses_ends(kind: str, settings: Any) -> None:
    settings.DJANGO_MQ = {"INBOXES": {"crm": {"kind": kind, "url": WRONG[kind], "source": "s"}}}
    with pytest.raises(CommandError, match=r"INBOXES.*the client refuses its options: "):
        call_command("mq_consume", "crm")


@pytest.mark.parametrize("group", ["a.b", "a b", "*"])
def test_nats_a_group_is_the_name_of_a_consumer(group: str) -> None:
    inbox = {"kind": "nats", "url": "nats://x", "source": "s", "group": group}
    [error] = find_errors({"INBOXES": {"crm": inbox}})
    assert "must have no blanks" in str(error)


@pytest.mark.parametrize(
    ("scheme", "address"),
    mostly_slow([each for each in SCHEMES if not each.startswith("http")], SERVERS),
    indirect=["address"],
)
def test_an_inbox_waits(
    scheme: str, address: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One line tells so, however often it tries; the client adds none."""
    caplog.set_level(logging.WARNING)
    kind = SCHEMES[scheme]
    options = {"kind": kind, "url": f"{scheme}://{address}/", "source": "s", "timeout": 0.3}
    settings.DJANGO_MQ = {"INBOXES": {"crm": {**options, "type": "shop.came"}}}
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            consumer.stop()
        return len(waits) == 2

    consumer._stop.wait = wait  # type: ignore[assignment, method-assign]
    assert consumer.run() == 0
    assert len(waits) == 2
    assert [getattr(each, "event", each.name) for each in caplog.records] == ["inbox_away"]
