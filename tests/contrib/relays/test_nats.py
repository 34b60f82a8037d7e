"""NATS: logins, encryption, and what its server says in no answer."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.errors import SecureConnWantedError

from django_mq.conf import get_settings
from django_mq.contrib.relays import nats_inbox, relay
from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.links import BrokerAway, Source, open_link, open_source
from django_mq.contrib.relays.nats_inbox import NatsSource
from django_mq.models import FailedAttempt, QueuedMessage
from tests.contrib.relays.brokers import NatsServer, program
from tests.contrib.relays.conftest import deliver
from tests.contrib.relays.test_kinds import relay_events, send
from tests.rows import the_message
from tests.slow import slow
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

USERS: list[dict[str, Any]] = [
    {"user": "boss", "password": "a@b/c"},
    {
        "user": "limited",
        "password": "p",
        "permissions": {"publish": {"deny": ["shop.Secret", "$JS.API.CONSUMER.MSG.NEXT.>"]}},
    },
]


class NatsWithUsers(NatsServer):
    user, login = "boss:a%40b%2Fc", USERS[0]

    @property
    def url(self) -> str:
        return f"nats://{self.user}@127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        command, environment = super().command()
        config = self.directory / "config"
        config.write_text(json.dumps({"authorization": {"users": USERS}}))
        return [*command, "-c", str(config)], environment


@pytest.fixture(scope="module")
def server() -> Iterator[NatsWithUsers]:
    """A server of which every message belongs to the stream `shop`."""
    server = NatsWithUsers()
    try:
        server.start()
        server._run(lambda stream: stream.add_stream(name="shop", subjects=["shop.>"]))
        yield server
    finally:
        server.close()


@pytest.fixture
def inbox(server: NatsWithUsers, settings: Any) -> Iterator[Callable[..., Source]]:
    """Open an inbox."""
    opened: list[Source] = []

    def open(source: str, **options: Any) -> Source:
        given = {"kind": "nats", "url": server.url, "source": source, "timeout": 5, **options}
        settings.DJANGO_MQ = {"INBOXES": {"crm": given}}
        opened.append(open_source("crm", get_settings().inboxes["crm"]))
        return opened[-1]

    yield open
    for each in opened:
        each.close()


def test_a_login_is_percent_decoded(server: NatsWithUsers, settings: Any) -> None:
    settings.DJANGO_MQ = {"RELAYS": {"events": {"kind": "nats", "url": server.url}}}
    relay("#", to="events")
    send("shop.login", 1)
    deliver()
    assert [each.body for each in server.received("shop.login", 1)] == [{"n": 1}]


def test_a_subject_that_the_login_may_not_use_fails_alone_and_at_once(
    server: NatsWithUsers, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says so in no answer: to wait for one would take as long as `timeout`."""
    url = server.url.replace(server.user, "limited:p")
    settings.DJANGO_MQ = {
        "RELAYS": {"events": {"kind": "nats", "url": url, "timeout": 200}},
    }
    relay("#", to="events")
    [forbidden, _] = send("shop.Secret", 1)[0], send("shop.free", 1)
    deliver()
    assert str(the_message().pk) == forbidden
    failed = FailedAttempt.objects.earliest("attempt")  # the first retry may be due soon
    assert failed.error_class.endswith("NotPermitted")
    assert 'permissions violation for publish to "shop.secret"' in failed.error_text
    assert relay_events(caplog) == []


def test_missing_permission_to_fetch_is_reported(
    server: NatsWithUsers, inbox: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_inbox, "CHECK_SECONDS", 0.0)
    url = server.url.replace(server.user, "limited:p")
    source = inbox("shop.limited", url=url, group="limited")
    with pytest.raises(BrokerAway, match=r"permissions violation for publish to .*msg\.next"):
        source.receive(1, 0.2)


def test_two_inboxes_of_one_stream_need_two_groups(inbox: Callable[..., Source]) -> None:
    """A durable consumer has one subject; its messages would be broadcast as another type."""
    inbox("shop.orders", group="shared")
    inbox("shop.orders", group="shared")
    expected = "'shared' of the stream shop takes shop.orders: give this inbox another 'group'"
    with pytest.raises(BrokerAway, match=expected):
        inbox("shop.stock", group="shared")
    inbox("shop.stock", group="other")


@pytest.mark.parametrize("what", ["stream", *slow("consumer")])
def test_consumption_resumes_after_a_deletion(
    what: str,
    server: NatsWithUsers,
    inbox: Callable[..., Source],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_inbox, "CHECK_SECONDS", 0.0)
    server._run(lambda stream: stream.add_stream(name="gone", subjects=["gone.>"]))
    inbox("gone.x")
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    consuming = threading.Thread(target=consumer.run)
    consuming.start()
    until(lambda: consumer.not_ready() == [])
    if what == "consumer":
        server._run(lambda stream: stream.delete_consumer("gone", "django_mq"))
    else:
        server._run(lambda stream: stream.delete_stream("gone"))
        until(lambda: consumer.not_ready() == ["it waits for the broker"])
        server._run(lambda stream: stream.add_stream(name="gone", subjects=["gone.>"]))
    server.publish("gone.x", b"{}")
    until(lambda: consumer.stored == 1)
    consumer.stop()
    consuming.join(60)
    server._run(lambda stream: stream.delete_stream("gone"))
    assert QueuedMessage.objects.count() == 1


def test_a_server_that_falls_silent_is_away(
    server: NatsWithUsers, inbox: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_inbox, "CHECK_SECONDS", 0.0)
    source = inbox("shop.silent", group="silent", timeout=1)
    server.proxy.hold(True)
    try:
        with pytest.raises(BrokerAway, match="no answer within 1 s"):
            source.receive(1, 0.1)
    finally:
        server.proxy.hold(False)


def test_tls_sends_no_login_to_a_server_without(settings: Any) -> None:
    heard: list[bytes] = []

    def serve(server: socket.socket) -> None:
        link, _ = server.accept()
        with link:
            link.sendall(b'INFO {"auth_required": true, "max_payload": 1000}\r\n')
            while data := link.recv(1000):
                heard.append(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        url = f"tls://bob:secret@127.0.0.1:{server.getsockname()[1]}"
        inbox = {"kind": "nats", "url": url, "source": "s", "timeout": 5}
        settings.DJANGO_MQ = {"INBOXES": {"crm": inbox}}
        with pytest.raises(BrokerAway, match=SecureConnWantedError.__name__):
            open_source("crm", get_settings().inboxes["crm"])
        serving.join(60)
    assert heard == []


class NatsWithTLS(NatsServer):
    """A server with a certificate of its own, for which no public authority vouches."""

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    @property
    def certificate(self) -> Path:
        return self.directory / "certificate"

    def command(self) -> tuple[list[str], dict[str, str]]:
        key = self.directory / "key"
        made = "req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 2"
        name = ["-addext", "subjectAltName=IP:127.0.0.1"]
        out = ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run([program("openssl"), *made.split(), *name, *out], check=True)
        command, environment = super().command()
        given = ["--tls", "--tlscert", str(self.certificate), "--tlskey", str(key)]
        return [*command, *given], environment


@pytest.mark.slow
def test_a_certificate_of_an_authority_of_your_own(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody vouches for it: an outage, which says so. SSL_CERT_FILE names the authority."""
    server = NatsWithTLS()
    inbox = {"kind": "nats", "url": server.url, "source": "s", "timeout": 5}
    settings.DJANGO_MQ = {
        "INBOXES": {"crm": inbox},
        "RELAYS": {"events": {"kind": "nats", "url": server.url}},
    }
    used = get_settings()
    try:
        server.start()
        with pytest.raises(BrokerAway, match="CERTIFICATE_VERIFY_FAILED"):
            open_source("crm", used.inboxes["crm"])
        with pytest.raises(BrokerAway, match="CERTIFICATE_VERIFY_FAILED"):
            open_link(used.relays["events"])
        monkeypatch.setenv("SSL_CERT_FILE", str(server.certificate))
        open_link(used.relays["events"]).close()
        with pytest.raises(BrokerAway, match="no JetStream stream has the subject s"):
            open_source("crm", used.inboxes["crm"])
    finally:
        server.close()


def test_a_list_of_servers(server: NatsWithUsers, inbox: Callable[..., Source]) -> None:
    """The first that answers is used."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = server.url.replace("@", f"@127.0.0.1:{closed.getsockname()[1]},")
        source = inbox("shop.several", url=url, group="several")
        assert isinstance(source, NatsSource)
        assert source.receive(1, 0.1) == []
