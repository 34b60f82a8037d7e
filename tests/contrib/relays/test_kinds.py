"""The promises of every kind of destination, with its real broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from django_mq import broadcast
from django_mq.contrib.relays import relay
from django_mq.models import QueuedMessage
from tests.contrib.relays.brokers import SERVERS, Broker, KafkaServer, needs_proxy
from tests.contrib.relays.conftest import deliver
from tests.rows import the_message
from tests.slow import slow

pytestmark = pytest.mark.django_db(transaction=True)

Declare = Callable[..., None]

#: Kafka takes seconds to begin: a plain run has it in one test.
rarely_kafka = pytest.mark.parametrize(
    "broker",
    [*(kind for kind in SERVERS if kind != KafkaServer.kind), *slow(KafkaServer.kind)],
    indirect=True,
    scope="module",
)


def send(place: str, *numbers: int, **options: object) -> list[str]:
    """Broadcast messages of the type `place`; return their ids."""
    with transaction.atomic():
        return [str(broadcast(place, {"n": n}, **options).copies[0].id) for n in numbers]  # type: ignore[arg-type]


def relay_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events that relays have logged, in order."""
    events = [getattr(each, "event", "") for each in caplog.records]
    return [each for each in events if each.startswith("relay_")]


def test_a_message_arrives_as_an_event(broker: Broker, place: str, relayed: Declare) -> None:
    relayed(options={"source": "https://shop.example.com"})
    metadata = {"tenant_id": "ä 5%", "tries": 3, "vip": True, "subject": "order 7"}
    [id] = send(place, 1, key="user:ä", metadata=metadata)
    created_at = the_message().created_at
    deliver()
    assert not QueuedMessage.objects.exists()
    [found] = broker.received(place, 1)
    assert found.body == {"n": 1}
    event = dict(found.attributes)
    if broker.kind == "nats":
        assert event.pop("datacontenttype") == "application/json"
    else:
        assert found.content_type == "application/json"
    assert datetime.fromisoformat(event.pop("time")) == created_at
    assert {name: str(value).lower() for name, value in event.items()} == {
        "specversion": "1.0",
        "id": id,
        "source": "https://shop.example.com",
        "type": place,
        "schemaversion": "1",
        "partitionkey": "user:ä",
        "tenantid": "ä 5%",
        "tries": "3",
        "vip": "true",
        "subject": "order 7",
    }
    if broker.kind == "kafka":
        assert found.key == "user:ä"
    if broker.kind == "nats":
        assert found.native_id is not None
        assert found.native_id.startswith(f"https://shop.example.com#{id}#")
    if broker.kind in ("amqp", "webhook"):
        assert found.native_id == id


@rarely_kafka
def test_a_structured_event_is_one_document(broker: Broker, place: str, relayed: Declare) -> None:
    relayed(options={"envelope": "structured"})
    [id] = send(place, 1)
    created_at = the_message().created_at
    deliver()
    [found] = broker.received(place, 1)
    assert found.content_type == "application/cloudevents+json; charset=utf-8"
    assert found.attributes == {}
    assert datetime.fromisoformat(found.body.pop("time")) == created_at.astimezone(UTC)
    assert found.body == {
        "specversion": "1.0",
        "id": id,
        "source": "/testproject",
        "type": place,
        "schemaversion": 1,
        "datacontenttype": "application/json",
        "data": {"n": 1},
    }


@rarely_kafka
def test_a_raw_message_is_its_payload(broker: Broker, place: str, relayed: Declare) -> None:
    relayed(options={"envelope": "raw"})
    send(place, 1, metadata={"tenant": "a"})
    deliver()
    [found] = broker.received(place, 1)
    assert (found.body, found.attributes) == ({"n": 1}, {})
    assert broker.kind == "nats" or found.content_type == "application/json"


@rarely_kafka
def test_each_message_arrives_once_and_those_of_a_key_in_order(
    broker: Broker, place: str, relayed: Declare
) -> None:
    relayed(max_batch=7)
    with transaction.atomic():
        for n in range(60):
            broadcast(place, {"n": n}, key=f"k{n % 3}" if n % 2 else None)
    deliver()
    found = [each.body["n"] for each in broker.received(place, 60)]
    assert sorted(found) == list(range(60))
    for remainder in range(3):
        of_key = [n for n in found if n % 2 and n % 3 == remainder]
        assert of_key == sorted(of_key)


def test_while_the_broker_is_away_messages_wait_without_an_attempt(
    broker: Broker, place: str, relayed: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    needs_proxy(broker)
    relayed(options={"timeout": 1})
    send(place, 1)
    deliver()  # a connection is open
    broker.refuse(True)
    send(place, 2, key="a")
    send(place, 3, key="a")
    deliver()
    assert [each.attempts for each in QueuedMessage.objects.order_by("id")] == [0, 0]
    first = QueuedMessage.objects.earliest("id")
    assert first.processable_after - first.created_at >= timedelta(seconds=5)
    assert relay_events(caplog) == ["relay_away"]
    broker.refuse(False)
    QueuedMessage.objects.update(processable_after=first.created_at)
    deliver()
    assert [each.body["n"] for each in broker.received(place, 3)] == [1, 2, 3]
    assert not QueuedMessage.objects.exists()
    assert relay_events(caplog) == ["relay_away", "relay_back"]


@rarely_kafka
def test_a_connection_that_was_cut_between_two_batches_is_replaced(
    broker: Broker, place: str, relayed: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    relayed()
    send(place, 1)
    deliver()
    broker.refuse(False)
    send(place, 2)
    deliver()
    # Keyless records of Kafka go to any partition.
    assert sorted(each.body["n"] for each in broker.received(place, 2)) == [1, 2]
    assert relay_events(caplog) == []


def test_stalled_link_counts_as_broker_away(
    broker: Broker, place: str, relayed: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    needs_proxy(broker)
    relayed(options={"timeout": 1})
    send(place, 1)
    deliver()
    broker.proxy.hold(True)
    send(place, 2)
    try:
        deliver()
        assert the_message().attempts == 0
        assert relay_events(caplog) == ["relay_away"]
    finally:
        broker.proxy.hold(False)
    QueuedMessage.objects.update(processable_after=the_message().created_at)
    deliver()
    assert not QueuedMessage.objects.exists()
    # At least once: the one that was held may arrive, too.
    assert {each.body["n"] for each in broker.received(place, 2)} == {1, 2}


def test_a_link_that_is_cut_is_not_waited_for(
    broker: Broker, place: str, relayed: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer can come any more: the relay does not use up its timeout."""
    needs_proxy(broker)
    relayed(options={"timeout": 200})
    send(place, 1)
    deliver()
    send(place, 2, key="cut-here")
    cuts = broker.proxy.cuts
    broker.proxy.cut_at("cut-here", arrives=False)
    deliver()
    assert broker.proxy.cuts == cuts + 1
    assert relay_events(caplog) == ["relay_away"]
    assert the_message().attempts == 0
    QueuedMessage.objects.update(processable_after=the_message().created_at)
    deliver()
    assert {each.body["n"] for each in broker.received(place, 2)} == {1, 2}


@pytest.mark.slow
def test_kafka_while_the_cluster_is_away_messages_wait_without_an_attempt(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker = KafkaServer()
    try:
        broker.start()
        options = {**broker.destination("shop.away"), "timeout": 1}
    finally:
        broker.close()
    settings.DJANGO_MQ = {"RELAYS": {"events": options}}
    relay("#", to="events")
    send("shop.away", 1)
    deliver()
    assert the_message().attempts == 0
    assert relay_events(caplog) == ["relay_away"]
