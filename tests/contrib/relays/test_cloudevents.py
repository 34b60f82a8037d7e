"""Events as the SDK of CloudEvents reads and writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from cloudevents.core.bindings import amqp, http, kafka
from cloudevents.core.v1.event import CloudEvent

from django_mq import Delivery, handler
from django_mq.conf import get_settings
from django_mq.conf.relays import Envelope
from django_mq.contrib.relays.consumer import Consumer
from django_mq.contrib.relays.envelope import Outgoing, outgoing, percent_encoded
from django_mq.contrib.relays.incoming import Incoming
from django_mq.handlers import isolated
from django_mq.testing import deliver
from tests.rows import the_message

METADATA = {"subject": 'ä 5% "x"', "tenant": "acme", "vip": True, "tries": 3, "tags": ["a"]}


class Binding(NamedTuple):
    """`read` gives the SDK a message of ours; `write` makes one that the broker would deliver."""

    name: str
    read: Callable[[Outgoing], Any]
    write: Callable[[CloudEvent, bool], Incoming]


def by_http(sent: Outgoing) -> Any:
    headers = {name: percent_encoded(value) for name, value in sent.headers("ce-").items()}
    return http.from_http_event(
        http.HTTPMessage({**headers, "content-type": sent.content_type}, sent.body)
    )


def by_kafka(sent: Outgoing) -> Any:
    headers = {name: value.encode() for name, value in sent.headers("ce_").items()}
    headers["content-type"] = sent.content_type.encode()
    return kafka.from_kafka_event(kafka.KafkaMessage(headers, sent.key, sent.body))


def by_amqp(sent: Outgoing) -> Any:
    headers = {f"cloudEvents_{name}": value for name, value in sent.attributes.items()}
    return amqp.from_amqp_event(
        amqp.AMQPMessage({"content-type": sent.content_type}, headers, sent.body)
    )


def of_http(event: CloudEvent, structured: bool) -> Incoming:  # as NATS has it, too
    found = (http.to_structured_event if structured else http.to_binary_event)(event)
    headers = dict(found.headers)
    return Incoming(found.body, headers, headers.pop("content-type"), "7")


def of_kafka(event: CloudEvent, structured: bool) -> Incoming:
    found = (kafka.to_structured_event if structured else kafka.to_binary_event)(event)
    headers = {name: value.decode() for name, value in found.headers.items()}
    return Incoming(found.value, headers, headers.pop("content-type"), "t/0/7", str(found.key))


def of_amqp(event: CloudEvent, structured: bool) -> Incoming:
    found = (amqp.to_structured_event if structured else amqp.to_binary_event)(event)
    headers = {name: str(value) for name, value in found.application_properties.items()}
    return Incoming(found.application_data, headers, found.properties["content-type"], "7")


BINDINGS = [
    Binding("http", by_http, of_http),
    Binding("kafka", by_kafka, of_kafka),
    Binding("amqp", by_amqp, of_amqp),
]


@pytest.fixture(params=BINDINGS, ids=lambda each: each.name)
def binding(request: pytest.FixtureRequest) -> Binding:
    found: Binding = request.param
    return found


@pytest.mark.django_db
@pytest.mark.parametrize("envelope", ["binary", "structured"])
def test_sdk_reads_the_events_of_a_relay(binding: Binding, envelope: Envelope) -> None:
    sent = []

    def relay(delivery: Delivery) -> None:
        sent.append(outgoing(delivery, envelope, "https://shop.example.com"))

    with isolated():
        handler("shop.placed", name="relay")(relay)
        deliver(relay, {"n": 1.5, "name": "ä"}, metadata=METADATA, key="user:ä")
    event = binding.read(sent[0])
    assert (event.get_type(), event.get_source()) == ("shop.placed", "https://shop.example.com")
    assert (event.get_specversion(), event.get_id()) == ("1.0", sent[0].id)
    assert event.get_time() == sent[0].created_at
    assert event.get_datacontenttype() == "application/json"
    assert event.get_data() == {"n": 1.5, "name": "ä"}
    assert event.get_subject() == METADATA["subject"]
    extensions = {name: event.get_extension(name) for name in ("tenant", "vip", "tries", "tags")}
    assert {name: str(value).lower() for name, value in extensions.items()} == {
        "tenant": "acme",
        "vip": "true",
        "tries": "3",
        "tags": '["a"]',
    }
    assert event.get_extension("partitionkey") == "user:ä"


@pytest.mark.django_db
@pytest.mark.parametrize("structured", [False, True], ids=["binary", "structured"])
def test_inbox_reads_the_events_of_the_sdk(
    binding: Binding, structured: bool, settings: Any
) -> None:
    attributes = {
        "specversion": "1.0",
        "id": "evt-1",
        "source": "/crm",
        "type": "crm.moved",
        "subject": "ä 5%",
        "partitionkey": "k",
        "tenant": "acme",
        "datacontenttype": "application/json",
    }
    settings.DJANGO_MQ = {
        "INBOXES": {
            "crm": {
                "kind": "amqp",
                "url": "amqp://localhost",
                "source": "q",
                "id": lambda message: message.attributes["id"],
                "type": lambda message: f"crm.{message.attributes['type']}",
            }
        }
    }
    raw = binding.write(CloudEvent(attributes, {"n": 1, "name": "ä"}), structured)
    Consumer("crm", get_settings().inboxes["crm"]).store([raw])
    message = the_message()
    assert (message.dead_reason, message.type) == ("", "crm.crm.moved")
    assert message.payload == {"n": 1, "name": "ä"}
    assert (message.unique_id, message.key) == ("crm:evt-1", "k")
    assert message.metadata["tenant"] == "acme"
    assert message.metadata["ce_subject"] == "ä 5%"
    assert message.metadata["ce_time"]
