"""Destinations of relays: the entries of `DJANGO_MQ["RELAYS"]`, read and checked."""
# ruff: noqa: RUF009  (`option` is `dataclasses.field`)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from django_mq.conf import broker_options, readers
from django_mq.conf.broker_options import (
    configuration,
    read_all,
    secret_option,
    signing_keys,
    text_or_empty,
    url_of,
)
from django_mq.conf.readers import SettingError, duration, flag, integer, one_of, option, optional

Envelope = Literal["binary", "structured", "raw"]
#: In the name of a topic, subject, stream or routing key, this stands for the message's type.
TYPE = "{type}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The options of every destination.

    `source`: the CloudEvents source, a URI that is unique to this project. `timeout`: seconds that
    the broker has to accept a connection, and to confirm messages that were sent together.
    """

    kind: str = option(readers.text)
    url: str = secret_option(readers.text)
    envelope: Envelope = option(one_of("binary", "structured", "raw"), "binary")
    source: str | None = option(optional(readers.text), None)
    timeout: float = option(duration(), 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpDestination(Destination):
    """RabbitMQ, and other brokers of AMQP 0-9-1.

    `mandatory`: a message that no queue of the broker receives counts as an error.
    """

    url: str = secret_option(url_of("amqp", "amqps"))
    exchange: str = option(text_or_empty, "amq.topic")
    routing_key: str = option(readers.text, TYPE)
    mandatory: bool = option(flag, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDestination(Destination):
    """Kafka. `config`: options of librdkafka, such as those of TLS and SASL."""

    url: str = secret_option(url_of("kafka", with_login=False, several=True))
    topic: str = option(readers.text, TYPE)
    config: Mapping[str, Any] = secret_option(configuration, make=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsDestination(Destination):
    """NATS with JetStream."""

    url: str = secret_option(url_of("nats", "tls", several=True))
    subject: str = option(readers.text, TYPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisDestination(Destination):
    """A stream of Redis or Valkey. `maxlen`: about how many entries the stream keeps."""

    url: str = secret_option(url_of("redis", "rediss", "unix"))
    stream: str = option(readers.text, TYPE)
    maxlen: int | None = option(optional(integer(1)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDestination(Destination):
    """An HTTP server, which gets each message in a POST request.

    `secret`: the key of the signature, of the Standard Webhooks specification; several while one
    replaces another. `headers`: further headers, such as `Authorization`. `concurrency`: how many
    requests of one thread of a worker may be open.
    """

    url: str = secret_option(url_of("http", "https", with_login=False))
    secret: tuple[str, ...] = secret_option(signing_keys, ())
    headers: Mapping[str, str] = secret_option(broker_options.headers, make=dict)
    concurrency: int = option(integer(1, 100), 8)


KINDS: Mapping[str, type[Destination]] = {
    "amqp": AmqpDestination,
    "kafka": KafkaDestination,
    "nats": NatsDestination,
    "redis": RedisDestination,
    "webhook": WebhookDestination,
}


def read_destinations(
    raw: Mapping[Any, Any], errors: list[SettingError]
) -> Mapping[str, Destination]:
    """Return the destinations in the value of RELAYS, by name; append the errors to `errors`."""
    return MappingProxyType(read_all("RELAYS", KINDS, ("url",), raw, errors))
