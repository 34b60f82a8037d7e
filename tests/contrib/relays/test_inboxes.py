"""Messages from a broker are broadcast once, or stored as dead letters; none is lost."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_mq import Delivery, broadcast, handler, queues
from django_mq.conf import get_settings
from django_mq.contrib.relays import consumer as consumer_module
from django_mq.contrib.relays import redis_inbox
from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.incoming import Incoming, Undecodable, decoded
from django_mq.contrib.relays.links import BrokerAway, open_source
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.testing import drain
from tests.contrib.relays.brokers import (
    Broker,
    RabbitServer,
    RedisServer,
    kinds,
    needs_proxy,
    running,
)
from tests.contrib.relays.conftest import deliver
from tests.contrib.relays.test_kinds import send
from tests.database import second_connection
from tests.rows import the_message
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import proxied
from tests.worker.conftest import proxy as proxy
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

Consume = Callable[..., int]


@pytest.fixture(scope="module", params=kinds("redis", "nats", without=("webhook",)))
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    with running(request.param) as broker:
        yield broker


@pytest.fixture
def consume(broker: Broker, place: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Consume:
    """Consume what is there, with further options of the inbox; return how many were stored."""

    def consume(**options: Any) -> int:
        inbox = {"kind": broker.kind, "url": broker.url, "source": place, "timeout": 5}
        given = getattr(settings, "DJANGO_MQ", {})
        settings.DJANGO_MQ = {**given, "INBOXES": {"crm": {**inbox, **group, **options}}}
        consumer = Consumer("crm", get_settings().inboxes["crm"])
        return consumer.run(until_empty=True)

    if broker.kind == "redis":  # it answers at once if it has anything, and the last read waits
        monkeypatch.setattr("django_mq.contrib.relays.consumer.READ_SECONDS", 0.05)
    group = {} if broker.kind == "amqp" else {"group": place.replace(".", "_")}
    return consume


only_redis = pytest.mark.parametrize("broker", [RedisServer.kind], indirect=True, scope="module")


def test_a_relayed_event_comes_in(
    broker: Broker, place: str, relayed: Callable[..., None], consume: Consume
) -> None:
    relayed()
    [id] = send(place, 7, key="k", metadata={"tenant": "ä", "mq": "x"})
    deliver()
    assert consume() == 1
    message = the_message()
    assert (message.type, message.payload, message.key) == ("inbox.crm", {"n": 7}, "k")
    metadata = dict(message.metadata)
    assert metadata.pop("ce_time")
    metadata.pop("headers", None)
    metadata.pop("ce_datacontenttype", None)
    assert metadata == {
        "ce_id": id,
        "ce_source": "/testproject",
        "ce_specversion": "1.0",
        "ce_type": place,
        "ce_partitionkey": "k",
        "mq": "x",
        "mq.inbox": "crm",
        "tenant": "ä",
    }
    assert message.unique_id is not None
    assert message.unique_id.startswith("crm:")
    assert UniqueKey.objects.get().unique_for.total_seconds() == 7 * 86400


def test_plain_json_comes_in_with_its_headers(broker: Broker, place: str, consume: Consume) -> None:
    broker.publish(place, b'{"n": 1}', id="first", tenant="a")
    assert consume(type=lambda raw: f"crm.{raw.headers['tenant']}", queue="default") == 1
    message = the_message()
    assert (message.type, message.payload) == ("crm.a", {"n": 1})
    assert message.metadata["headers"]["tenant"] == "a"


def test_stored_messages_are_acked(broker: Broker, place: str, consume: Consume) -> None:
    for n in range(30):
        broker.publish(place, b"[%d]" % n, id=str(n))
    assert consume(batch_size=7) == 30
    assert sorted(each.payload[0] for each in QueuedMessage.objects.all()) == list(range(30))
    assert consume() == 0


def test_redelivered_message_is_stored_once(broker: Broker, place: str, consume: Consume) -> None:
    """The commit succeeded, and the ack was lost; also after the message was handled."""
    handled = []

    @handler("inbox.crm", name="crm")
    def keep(delivery: Delivery) -> None:
        handled.append(delivery.id)

    broker.publish(place, b"{}", id="one")
    consume()
    raw = Incoming(b"{}", {}, "", (the_message().unique_id or "").removeprefix("crm:"))
    again = Consumer("crm", get_settings().inboxes["crm"])
    again.store([raw, raw])
    assert drain() == 1
    again.store([raw])
    assert drain() == 0
    assert len(handled) == 1


def test_undecodable_body_is_a_dead_letter(broker: Broker, place: str, consume: Consume) -> None:
    broker.publish(place, b"\xff no json", id="bad")
    broker.publish(place, b"{}", id="good")
    assert consume() == 2
    dead = QueuedMessage.objects.get(dead_at__isnull=False)
    assert base64.b64decode(dead.payload["raw"]) == b"\xff no json"
    assert (dead.type, dead.metadata) == ("inbox.crm", {"mq.inbox": "crm"})
    assert "its body is not JSON" in dead.dead_reason
    assert "came in through an inbox, and cannot be broadcast" in queues.why(dead.pk).text
    assert QueuedMessage.objects.filter(dead_at=None).count() == 1


@pytest.mark.thorough
@pytest.mark.parametrize("broker", [RabbitServer.kind], indirect=True, scope="module")
def test_amqp_has_no_id_of_its_own(broker: Broker, place: str, consume: Consume) -> None:
    broker.publish(place, b'{"n": 1}')
    assert consume() == 1
    assert "no message_id" in the_message().dead_reason
    QueuedMessage.objects.all().delete()
    broker.publish(place, b'{"n": 1}')
    broker.publish(place, b'{"n": 1}')
    assert consume(id="hash") == 1
    assert the_message().unique_id == "crm:" + hashlib.sha256(b'{"n": 1}').hexdigest()


@only_redis
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"id": lambda raw: raw.payload["id"]}, "KeyError"),
        ({"id": lambda raw: 5}, "returned int, not text"),
        ({"id": lambda raw: ""}, "the inbox's 'id' returned an empty text"),
        ({"type": lambda raw: "two words"}, "InvalidName"),
        ({"type": lambda raw: None}, "returned NoneType, not text"),
    ],
)
def test_bad_result_of_a_callable_is_a_dead_letter(
    broker: Broker, place: str, consume: Consume, options: dict[str, Any], reason: str
) -> None:
    broker.publish(place, b"{}", id="x")
    assert consume(**options) == 1
    message = the_message()
    assert reason in message.dead_reason
    assert "two words" not in message.dead_reason


@only_redis
def test_a_message_beyond_the_limits_is_a_dead_letter_with_all_of_it(
    broker: Broker, place: str, consume: Consume, settings: Any
) -> None:
    settings.DJANGO_MQ = {"MAX_PAYLOAD_BYTES": 100}
    body = json.dumps(["x" * 200]).encode()
    broker.publish(place, body, id="long")
    broker.publish(place, b'{"nul": "\\u0000"}', id="nul")
    broker.publish(place, b"{}", id="good")
    assert consume() == 3
    dead = QueuedMessage.objects.filter(dead_at__isnull=False).order_by("id")
    assert [base64.b64decode(each.payload["raw"]) for each in dead] == [
        body,
        b'{"nul": "\\u0000"}',
    ]


@only_redis
def test_a_long_id_is_hashed(broker: Broker, place: str, consume: Consume) -> None:
    broker.publish(place, b"{}")
    assert consume(id=lambda raw: "x" * 200) == 1
    assert the_message().unique_id == "crm:" + hashlib.sha256(b"crm:" + b"x" * 200).hexdigest()


def test_while_the_broker_is_away_it_waits(
    broker: Broker,
    place: str,
    consume: Consume,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    needs_proxy(broker)
    broker.publish(place, b"{}", id="one")
    assert consume() == 1
    broker.publish(place, b"{}", id="two")
    broker.refuse(True)
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    consumer._stop.wait = lambda seconds: broker.refuse(False)  # type: ignore[assignment]
    assert consumer.run(until_empty=True) == 1
    events = [getattr(each, "event", "") for each in caplog.records]
    assert [each for each in events if each.startswith("inbox")][2:] == [
        "inbox_started",
        "inbox_away",
        "inbox_back",
        "inbox_stopped",
    ]


@only_redis
def test_a_full_queue_makes_it_wait(
    broker: Broker, place: str, consume: Consume, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"default": {"max_backlog": 1}}, "REQUIRE_ATOMIC": False}
    broadcast("a.b")
    broker.publish(place, b"{}", id="one")
    inbox = {"kind": broker.kind, "url": broker.url, "source": place}
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "INBOXES": {"crm": inbox}}
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    consumer._stop.wait = lambda seconds: QueuedMessage.objects.all().delete()  # type: ignore[assignment]
    assert consumer.run(until_empty=True) == 1
    assert the_message().type == "inbox.crm"
    assert "max_backlog" in caplog.text


class Sixty:
    """A broker with sixty messages."""

    def __init__(self) -> None:
        self.left = [Incoming(b"[%d]" % n, {}, "", str(n)) for n in range(60)]

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        return self.left[:limit]

    def ack(self, batch: list[Incoming]) -> None:
        del self.left[: len(batch)]

    def keep_alive(self) -> None:
        """Do nothing: it never gives up on a consumer."""

    def close(self) -> None:
        """Do nothing: it has no connection."""


def test_a_batch_larger_than_the_limit_of_its_queue_is_stored_in_parts(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once never have room, not even in an empty queue."""
    inbox = {"kind": "amqp", "url": "amqp://x", "source": "q", "queue": "crm"}
    settings.DJANGO_MQ = {"QUEUES": {"crm": {"max_backlog": 50}}, "INBOXES": {"crm": inbox}}
    handled: list[int] = []
    handler("inbox.crm", queue="crm", name="crm")(
        lambda delivery: handled.append(*delivery.payload)
    )
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    source, waits = Sixty(), []

    def wait(seconds: float) -> None:
        drain()
        waits.append(seconds)
        if len(waits) == 20:
            consumer.stop()

    monkeypatch.setattr(consumer_module, "open_source", lambda name, inbox: source)
    monkeypatch.setattr(consumer._stop, "wait", wait)
    consumer.run(until_empty=True)
    drain()
    assert handled == list(range(60))
    assert not source.left
    assert consumer.stored == 60


@only_redis
def test_a_database_that_hangs_is_away(
    broker: Broker,
    place: str,
    consume: Consume,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    consume()
    monkeypatch.setattr(consumer_module, "ANSWER_SECONDS", 0.5)
    broker.publish(place, b"{}", id="one")
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    proxy.hold_at("django_mq_queuedmessage")
    with proxied(proxy):
        thread = threading.Thread(target=consumer.run, kwargs={"until_empty": True}, daemon=True)
        thread.start()
        until(proxy.is_holding, "its statement hangs")
        proxy.freeze()
        thread.join(60)
    assert consumer.stored == 1
    assert the_message().type == "inbox.crm"
    assert "it waits for the database: connection stalled" in caplog.text
    assert "it consumes again" in caplog.text


@only_redis
def test_a_locked_table_keeps_no_session_per_try(
    broker: Broker, place: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose statement waits for a lock does not notice that its client is gone."""
    consume()
    monkeypatch.setattr(consumer_module, "ANSWER_SECONDS", 0.3)
    broker.publish(place, b"{}", id="one")
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    tries: list[str] = []
    monkeypatch.setattr(consumer, "_wait_for", lambda what, reason: tries.append(reason))
    thread = threading.Thread(target=consumer.run, kwargs={"until_empty": True}, daemon=True)
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage")
        thread.start()
        until(lambda: len(tries) > 2, "it tries again and again")
        found = other.execute(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock'"
        ).fetchone()
    assert found is not None
    assert found[0] <= 1
    thread.join(60)
    assert consumer.stored == 1


@only_redis
def test_the_command_consumes(
    broker: Broker, place: str, consume: Consume, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.publish(place, b"{}", id="one")
    inbox = {"kind": broker.kind, "url": broker.url, "source": place}
    settings.DJANGO_MQ = {"INBOXES": {"crm": inbox}}
    call_command("mq_consume", "crm", "--until-empty")
    assert capsys.readouterr().out == "1 message was stored.\n"
    with pytest.raises(CommandError, match=r"has no inbox 'cmr' \(it has crm\)") as caught:
        call_command("mq_consume", "cmr")
    assert caught.value.returncode == 2
    with pytest.raises(CommandError, match="DATABASES has no 'nope'"):
        call_command("mq_consume", "crm", "--database", "nope")


@only_redis
def test_a_full_disk_behind_its_output_is_no_failure(
    broker: Broker, place: str, settings: Any
) -> None:
    settings.DJANGO_MQ = {
        "INBOXES": {"crm": {"kind": broker.kind, "url": broker.url, "source": place}}
    }
    broker.publish(place, b"{}", id="one")
    consumed = False
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:
        call_command("mq_consume", "crm", "--until-empty", stdout=full)
        consumed = True
    assert consumed
    assert QueuedMessage.objects.count() == 1


@only_redis
def test_redis_unacked_entries_of_a_lost_connection_are_redelivered_at_once(
    broker: Broker, place: str, consume: Consume
) -> None:
    consume()
    for n in range(3):
        broker.publish(place, b"[%d]" % n)
    lost = open_source("crm", get_settings().inboxes["crm"])
    assert len(lost.receive(10, 1.0)) == 3
    lost.close()
    assert consume(batch_size=2) == 3


@pytest.mark.parametrize(
    ("body", "payload"),
    [
        ({"data": [1]}, [1]),
        ({"data": None}, {}),
        ({"data_base64": "aGk="}, {"data_base64": "aGk="}),
        ({}, {}),
    ],
)
def test_the_data_of_a_structured_event_is_the_payload(
    body: dict[str, Any], payload: Any, settings: Any
) -> None:
    event = json.dumps({"specversion": "1.0", "id": "1", "type": "t", "source": "/", **body})
    raw = Incoming(event.encode(), {}, "application/cloudevents+json; charset=utf-8", "7")
    settings.DJANGO_MQ = {"INBOXES": {"crm": {"kind": "amqp", "url": "amqp://x", "source": "q"}}}
    Consumer("crm", get_settings().inboxes["crm"]).store([raw])
    message = the_message()
    assert (message.payload, message.dead_at) == (payload, None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"body": b"[]", "content_type": "application/cloudevents+json"}, "not a CloudEvent"),
        ({"headers": {"ce-subject": "%C0%A0"}}, "percent-encoded"),
        ({"body": b"[" * 100_000}, "not JSON"),
        ({"headers": {"tenant": "nul \0"}}, "InvalidPayload"),
        ({"body": b'{"a": 1e400}'}, "InvalidPayload"),
        ({"headers": {"tenant": "\udcff"}}, "InvalidPayload"),
        ({"headers": {"\udcff": "a"}}, "InvalidPayload"),
        ({"body": b"{", "content_type": "text/\0plain", "id": "a\0b"}, "not JSON"),
        ({"body": b"{", "content_type": "\udcff", "id": "\udcff"}, "not JSON"),
    ],
)
def test_odd_messages_are_dead_letters_and_harm_no_other(
    given: dict[str, Any], reason: str, settings: Any
) -> None:
    settings.DJANGO_MQ = {"INBOXES": {"crm": {"kind": "amqp", "url": "amqp://x", "source": "q"}}}
    bad = Incoming(**{"body": b"{}", "headers": {}, "content_type": "", "id": "1", **given})
    good = Incoming(b"{}", {}, "", "2")
    Consumer("crm", get_settings().inboxes["crm"]).store([good, bad])
    dead = QueuedMessage.objects.get(dead_at__isnull=False)
    assert reason in dead.dead_reason
    assert QueuedMessage.objects.get(dead_at=None).unique_id == "crm:2"


def test_kafka_a_record_whose_headers_cannot_be_read_is_a_dead_letter() -> None:
    """The client for Python cannot send one, so this record is made by hand."""
    kafka_inbox = pytest.importorskip("django_mq.contrib.relays.kafka_inbox")

    class Record:
        topic, partition, offset = (staticmethod(lambda each=each: each) for each in ("t", 0, 7))
        key, value = staticmethod(lambda: None), staticmethod(lambda: b"{}")

        def headers(self) -> list[tuple[str, bytes]]:
            return [(b"\xff".decode(), b"")]

    found = kafka_inbox._incoming(Record())
    assert (found.id, found.body, found.headers) == ("t/0/7", b"{}", {})
    with pytest.raises(Undecodable, match="the name of a header is not UTF-8"):
        decoded(found)


@only_redis
def test_redis_consumers_that_are_gone_are_removed_unless_they_hold_an_entry(
    broker: RedisServer, place: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has its own name, so a group would grow with each restart."""
    import redis

    consume()
    group = get_settings().inboxes["crm"].group  # type: ignore[union-attr]
    with redis.Redis.from_url(broker.url) as client:

        def consumers() -> set[str]:
            return {each["name"].decode() for each in client.xinfo_consumers(place, group)}

        broker.publish(place, b"{}")
        client.xreadgroup(group, "killed", {place: ">"})
        client.xgroup_createconsumer(place, group, "ended")
        consume()
        assert {"killed", "ended"} < consumers()
        monkeypatch.setattr(redis_inbox, "FORGET_AFTER", -1.0)
        consume()
        assert consumers() & {"killed", "ended"} == {"killed"}


@only_redis
def test_redis_user_without_access_to_the_consumers_can_consume(
    broker: RedisServer, place: str, consume: Consume
) -> None:
    """An access list may allow only the commands that consuming needs."""
    import redis

    allowed = ["+xgroup|create", "+xreadgroup", "+xautoclaim", "+xack"]
    with redis.Redis.from_url(broker.url) as client:
        client.acl_setuser("shop", True, passwords="+pw", keys="*", commands=allowed)
    broker.publish(place, b"{}")
    assert consume(url=broker.url.replace("://", "://shop:pw@")) == 1


@only_redis
def test_redis_an_entry_without_data_is_a_dead_letter(
    broker: RedisServer, place: str, consume: Consume
) -> None:
    """It is of another program: an empty payload would hide what the entry says."""
    import redis

    with redis.Redis.from_url(broker.url) as client:
        client.xadd(place, {"customer": "7"})
        client.xadd(place, {"ce_id": "1", "ce_type": "crm.moved"})
    assert consume() == 2
    dead = QueuedMessage.objects.get(dead_at__isnull=False)
    assert "its entry has no field 'data'" in dead.dead_reason
    assert dead.payload["headers"] == {"customer": "7"}
    assert QueuedMessage.objects.get(dead_at=None).payload == {}


@pytest.mark.parametrize("broker", ["nats"], indirect=True, scope="module")
def test_subject_without_a_nats_stream_is_named(broker: Broker, settings: Any) -> None:
    inbox = {"kind": "nats", "url": broker.url, "source": "nobody.sends", "timeout": 5}
    settings.DJANGO_MQ = {"INBOXES": {"crm": inbox}}
    with pytest.raises(BrokerAway, match=r"no JetStream stream has the subject nobody\.sends: "):
        open_source("crm", get_settings().inboxes["crm"])


@pytest.mark.thorough
@pytest.mark.parametrize("broker", [RabbitServer.kind], indirect=True, scope="module")
def test_amqp_odd_properties_and_a_deleted_queue_stop_nothing(
    broker: RabbitServer, place: str, consume: Consume, settings: Any
) -> None:
    import pika

    properties = pika.BasicProperties(message_id=b"\xff", content_type=b"\xfe", headers={"a": 1})
    with broker._channel() as channel:
        channel.basic_publish("", place, b"{}", properties)
    assert consume() == 1
    assert the_message().unique_id == "crm:\ufffd"
    source = open_source("crm", get_settings().inboxes["crm"])
    assert source.receive(1, 0.1) == []
    with broker._channel() as channel:
        channel.queue_delete(place)
    with pytest.raises(BrokerAway, match="the queue was deleted"):
        source.receive(1, 5)
    source.close()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(1_900_000_000_000, id="in ms"),
        *slow(pytest.param(2**64 - 1, id="largest")),
    ],
)
@pytest.mark.parametrize("broker", [RabbitServer.kind], indirect=True, scope="module")
def test_amqp_a_message_whose_headers_cannot_be_read_is_a_dead_letter(
    broker: RabbitServer, place: str, consume: Consume, moment: int
) -> None:
    """The client raised an error, so the message came again for ever and none behind it came."""
    import pika

    year_2030 = datetime(2030, 1, 1, tzinfo=UTC)
    seconds = int(year_2030.timestamp()).to_bytes(8, "big")

    class Properties(pika.BasicProperties):
        def encode(self) -> Any:
            return [part.replace(seconds, moment.to_bytes(8, "big")) for part in super().encode()]

    with broker._channel() as channel:
        channel.basic_publish("", place, b"bad", Properties(headers={"sent": year_2030}))
        channel.basic_publish("", place, b"{}", pika.BasicProperties(message_id="2"))
    assert consume() == 2
    dead = QueuedMessage.objects.get(dead_at__isnull=False)
    assert dead.dead_reason.startswith("cannot be broadcast: its properties cannot be decoded")
    assert base64.b64decode(dead.payload["raw"]) == b"bad"
    assert QueuedMessage.objects.get(dead_at=None).unique_id == "crm:2"
    assert consume() == 0


def test_a_consumer_is_live_while_it_waits_for_its_broker(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To restart it would not help; it is stalled if nothing moves."""
    monkeypatch.setattr(consumer_module, "FIRST_WAIT", 0.01)
    inbox = {"kind": "redis", "url": "redis://127.0.0.1:9", "source": "s"}
    settings.DJANGO_MQ = {"INBOXES": {"crm": inbox}}
    consumer = Consumer("crm", get_settings().inboxes["crm"])
    assert consumer.not_ready() == ["it has not read from the broker yet"]
    consuming = threading.Thread(target=consumer.run, daemon=True)
    consuming.start()
    until(lambda: consumer.not_ready() == ["it waits for the broker"])
    for _ in range(2):
        before = consumer._moved_at
        until(lambda before=before: consumer._moved_at > before)  # type: ignore[misc]
    assert consumer.not_live() == []
    consumer.stop()
    consuming.join(60)
    monkeypatch.setattr(consumer_module, "STALLED_SECONDS", -1.0)
    assert consumer.not_live() == ["the inbox is stalled"]
