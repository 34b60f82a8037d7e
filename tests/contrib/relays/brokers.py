"""Real brokers for tests: each is started for a module, and read by its own client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from tests.ports import free_port
from tests.waiting import SOON, until
from tests.worker.proxy import Proxy

PLACES = "/usr/lib/rabbitmq/bin:/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"


class Received(NamedTuple):
    """One message as a consumer sees it: its attributes without prefix, and its body."""

    attributes: Mapping[str, Any]
    content_type: str
    body: Any
    key: str | None = None
    native_id: str | None = None
    headers: Mapping[str, str] = {}


class Broker:
    """A broker behind a proxy, which can cut all connections to it, and refuse new ones."""

    kind = ""
    #: The option of a destination that names a topic, stream or subject.
    place = ""

    def __init__(self) -> None:
        self.server_port, *self.other_ports = (free_port() for _ in range(3))
        self.proxy = Proxy({"host": "127.0.0.1", "port": self.server_port})
        self.port = self.proxy.port
        self.directory = Path(tempfile.mkdtemp(prefix="django_mq-broker-"))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def command(self) -> tuple[list[str], dict[str, str]]:
        raise NotImplementedError

    def start(self) -> None:
        command, environment = self.command()
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        until(self._is_up, f"{self.kind} answers", seconds=3 * SOON)

    def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
            self.process = None

    def refuse(self, refusing: bool) -> None:
        """Cut every connection; be away while `refusing`."""
        self.proxy.refuse(True)
        self.proxy.refuse(refusing)

    def close(self) -> None:
        self.proxy.close()
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def destination(self, place: str) -> dict[str, Any]:
        """Return the options of a destination at a place of the test's own."""
        return {"kind": self.kind, "url": self.url, self.place: place, "timeout": 5}

    def prepare(self, place: str) -> None:
        """Make the place ready to get messages."""

    def received(self, place: str, count: int) -> list[Received]:
        """Return the first `count` messages of a place, waiting for them."""
        raise NotImplementedError

    def publish(self, place: str, body: bytes, **headers: str) -> None:
        """Publish a message like another program; `id` becomes the broker's own, if it has one."""
        raise NotImplementedError

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text()
        return self.answers()

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.server_port), 1).close()
        except OSError:
            return False
        return True


def program(name: str) -> str:
    """Return the path of a server's program; skip the test if it is not installed."""
    found = shutil.which(name, path=PLACES)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


class RedisServer(Broker):
    kind, place = "redis", "stream"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> tuple[list[str], dict[str, str]]:
        given = f"--port {self.server_port} --bind 127.0.0.1 --dir {self.directory}"
        return [program("redis-server"), *given.split()], {}

    def received(self, place: str, count: int) -> list[Received]:
        import redis

        with redis.Redis.from_url(self.url, decode_responses=True) as client:
            until(lambda: client.xlen(place) >= count, "the entries are there")
            entries = client.xrange(place)
        return [
            Received(
                without(fields, "ce_"),
                fields["content-type"],
                json.loads(fields["data"]),
                headers=fields,
            )
            for _, fields in entries
        ]

    def publish(self, place: str, body: bytes, **headers: str) -> None:
        import redis

        with redis.Redis.from_url(self.url) as client:
            client.xadd(place, {**headers, "data": body})


class NatsServer(Broker):
    kind, place = "nats", "subject"
    #: The login of the tests' own client.
    login: Mapping[str, str] = {}

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        given = f"-a 127.0.0.1 -p {self.server_port} -js -sd {self.directory}"
        return [program("nats-server"), *given.split()], {}

    def prepare(self, place: str) -> None:
        self._run(lambda stream: stream.add_stream(name=place.replace(".", "_"), subjects=[place]))

    def received(self, place: str, count: int) -> list[Received]:
        async def read(stream: Any) -> list[Any]:
            subscription = await stream.pull_subscribe(place, "reader")
            found: list[Any] = []
            while len(found) < count:
                fetched = await subscription.fetch(count - len(found), timeout=30)
                for each in fetched:
                    await each.ack()
                found += fetched
            return found

        return [
            Received(
                without({k: unquote(v) for k, v in (each.headers or {}).items()}, "ce-"),
                (each.headers or {}).get("Content-Type", ""),
                json.loads(each.data),
                native_id=(each.headers or {}).get("Nats-Msg-Id"),
                headers=each.headers or {},
            )
            for each in self._run(read)
        ]

    def publish(self, place: str, body: bytes, **headers: str) -> None:
        self._run(lambda stream: stream.publish(place, body, headers=headers or None))

    def _run(self, function: Any) -> Any:
        import nats

        async def run() -> Any:
            client = await nats.connect(f"nats://127.0.0.1:{self.port}", **self.login)
            try:
                return await function(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(run())


class RabbitServer(Broker):
    kind, place = "amqp", "routing_key"

    def __init__(self) -> None:
        super().__init__()
        self._names: subprocess.Popen[bytes] | None = None
        self.epmd = {"ERL_EPMD_PORT": str(self.other_ports[0]), "ERL_EPMD_ADDRESS": "127.0.0.1"}

    def start(self) -> None:
        command = [program("epmd"), "-port", self.epmd["ERL_EPMD_PORT"], "-address", "127.0.0.1"]
        # Else the server starts one, and leaves it.
        self._names = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        super().start()

    def close(self) -> None:
        super().close()
        if self._names is not None:
            self._names.kill()
            self._names.wait(30)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def command(self) -> tuple[list[str], dict[str, str]]:
        at = self.directory
        (at / "plugins").write_text("[].")
        return [program("rabbitmq-server")], {
            "HOME": str(at),
            "RABBITMQ_NODENAME": f"test{self.server_port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.server_port),
            "RABBITMQ_DIST_PORT": str(self.other_ports[1]),
            "RABBITMQ_MNESIA_BASE": f"{at}/mnesia",
            "RABBITMQ_LOG_BASE": f"{at}/logs",
            "RABBITMQ_PID_FILE": f"{at}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{at}/plugins",
            "RABBITMQ_CONFIG_FILE": f"{at}/none",
            **self.epmd,
        }

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.server_port), 1) as link:
                link.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(link.recv(1))
        except OSError:
            return False

    def prepare(self, place: str) -> None:
        with self._channel() as channel:
            channel.queue_declare(place, durable=True)
            channel.queue_bind(place, "amq.topic", place)

    def received(self, place: str, count: int) -> list[Received]:
        found: list[Any] = []
        with self._channel() as channel:

            def get() -> bool:
                method, properties, body = channel.basic_get(place, auto_ack=True)
                if method is not None:
                    found.append((properties, body))
                return len(found) >= count

            until(get, "the messages are in the queue")
        return [
            Received(
                without(properties.headers or {}, "cloudEvents_"),
                properties.content_type,
                json.loads(body),
                native_id=properties.message_id,
                headers={"type": properties.type, "mode": str(properties.delivery_mode)},
            )
            for properties, body in found
        ]

    def publish(self, place: str, body: bytes, **headers: str) -> None:
        import pika

        id = headers.pop("id", None)
        properties = pika.BasicProperties(headers=headers, message_id=id)
        with self._channel() as channel:
            channel.basic_publish("amq.topic", place, body, properties)

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        import pika

        connection = pika.BlockingConnection(pika.URLParameters(self.url))
        try:
            yield connection.channel()
        finally:
            connection.close()


class KafkaServer(Broker):
    """Not behind the proxy: the broker tells its clients where it is."""

    kind, place = "kafka", "topic"

    def command(self) -> tuple[list[str], dict[str, str]]:
        pytest.importorskip("confluent_kafka")
        module = "tests.contrib.relays.kafka_server"
        root = Path(__file__).parents[3]
        address = str(self.directory / "address")
        return [sys.executable, "-m", module, address], {"PYTHONPATH": str(root)}

    @property
    def url(self) -> str:
        return f"kafka://{(self.directory / 'address').read_text()}"

    def answers(self) -> bool:
        return (self.directory / "address").exists()

    def received(self, place: str, count: int) -> list[Received]:
        from confluent_kafka import Consumer

        found: list[Any] = []
        consumer = Consumer(
            {
                "bootstrap.servers": self.url.removeprefix("kafka://"),
                "group.id": place,
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe([place])
        try:

            def poll() -> bool:
                record = consumer.poll(0.2)
                if record is not None and record.error() is None:
                    found.append(record)
                return len(found) >= count

            until(poll, "the records are in the topic")
        finally:
            consumer.close()
        return [self._received(each) for each in found]

    def publish(self, place: str, body: bytes, **headers: str) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.url.removeprefix("kafka://")})
        producer.produce(place, body, headers=list(headers.items()))
        assert producer.flush(30) == 0

    def _received(self, record: Any) -> Received:
        headers = {name: value.decode() for name, value in record.headers()}
        return Received(
            without(headers, "ce_"),
            headers["content-type"],
            json.loads(record.value()),
            key=record.key() and record.key().decode(),
            headers=headers,
        )


class HttpServer(Broker):
    """A server in a thread, which answers as `answers_with` says."""

    kind, place = "webhook", ""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self.status: dict[str, int] = {}
        self.answer_headers: dict[str, str] = {}
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def destination(self, place: str) -> dict[str, Any]:
        return {"kind": self.kind, "url": f"{self.url}/{place}", "timeout": 5}

    def start(self) -> None:
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status = broker.status.get(self.headers.get("webhook-id", ""), 204)
                if status < 0:  # it does not read the body, and resets the connection
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if 0 < status < 300:
                    broker.requests.append((self.path, dict(self.headers), body))
                if not status:  # it fails
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in broker.answer_headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.server_port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def received(self, place: str, count: int) -> list[Received]:
        def found() -> list[tuple[str, Mapping[str, str], bytes]]:
            return [each for each in self.requests if each[0] == f"/{place}"]

        until(lambda: len(found()) >= count, "the requests have come")
        return [
            Received(
                without({k.lower(): unquote(v) for k, v in headers.items()}, "ce-"),
                headers["Content-Type"],
                json.loads(body),
                native_id=headers["Webhook-Id"],
                headers={name.lower(): value for name, value in headers.items()},
            )
            for _, headers, body in found()
        ]


def without(headers: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the headers that begin with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in headers.items() if k.startswith(prefix)}


SERVERS: dict[str, type[Broker]] = {
    each.kind: each for each in (RedisServer, NatsServer, RabbitServer, KafkaServer, HttpServer)
}


def kinds(*quick: str, without: tuple[str, ...] = ()) -> list[Any]:
    """Return the kinds to test with: `quick` ones in each run, the others in a thorough one."""
    return [
        kind if kind in quick else pytest.param(kind, marks=pytest.mark.thorough)
        for kind in SERVERS
        if kind not in without
    ]


@contextmanager
def running(kind: str) -> Iterator[Broker]:
    """Run a broker within the block."""
    broker = SERVERS[kind]()
    try:
        broker.start()
        yield broker
    finally:
        broker.close()


def needs_proxy(broker: Broker) -> None:
    """Skip the test if the broker cannot be cut off."""
    if broker.kind == "kafka":
        pytest.skip("no proxy can cut it off: it tells its clients where it is")
