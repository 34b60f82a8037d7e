"""Inboxes: the entries of `DJANGO_MQ["INBOXES"]`, read and checked."""
# ruff: noqa: RUF009  (`option` is `dataclasses.field`)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from django_mq.conf import readers
from django_mq.conf.broker_options import (
    configuration,
    read_all,
    secret_option,
    url_of,
)
from django_mq.conf.readers import SettingError, duration, integer, option, optional

WEEK = 7 * 86400.0


def _name_or_callable(value: object) -> object:
    if callable(value):
        return value
    try:
        return readers.name(value)
    except ValueError as error:
        raise ValueError(f"{error}; or a callable that returns one") from None


def _durable(value: object) -> str:
    name = readers.text(value)
    if re.search(r"[\s.*>/\\]", name):
        raise ValueError("must have no blanks, and none of . * > / \\")
    return name


def _id(value: object) -> object:
    if callable(value) or value in ("message_id", "hash"):
        return value
    raise ValueError("must be 'message_id', 'hash', or a callable that returns a text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """The options of every inbox.

    `source`: the name of the queue, topic, subject or stream. `type`: of the messages that are
    broadcast, default `inbox.<name>`. `queue`: as in `broadcast()`. `id`: what makes a message
    unique. `unique_for`: seconds for which its id stays taken after a success. `batch_size`: how
    many messages one transaction stores at most. `timeout`: seconds that the broker has to answer.
    """

    kind: str = option(readers.text)
    url: str = secret_option(readers.text)
    source: str = option(readers.text)
    type: str | Callable[[Any], str] | None = option(optional(_name_or_callable), None)
    queue: str | None = option(optional(readers.name), None)
    id: str | Callable[[Any], str] = option(_id, "message_id")
    unique_for: float | None = option(optional(duration()), WEEK)
    batch_size: int = option(integer(1, 10_000), 100)
    timeout: float = option(duration(), 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpInbox(Inbox):
    """A queue of RabbitMQ, or of another broker of AMQP 0-9-1."""

    url: str = secret_option(url_of("amqp", "amqps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaInbox(Inbox):
    """A topic of Kafka. `group`: of the consumers. `config`: options of librdkafka."""

    url: str = secret_option(url_of("kafka", with_login=False, several=True))
    group: str = option(readers.text, "django_mq")
    config: Mapping[str, Any] = secret_option(configuration, make=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsInbox(Inbox):
    """A subject of NATS JetStream. `group`: the durable consumer."""

    url: str = secret_option(url_of("nats", "tls", several=True))
    group: str = option(_durable, "django_mq")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisInbox(Inbox):
    """A stream of Redis or Valkey. `group`: of the consumers."""

    url: str = secret_option(url_of("redis", "rediss", "unix"))
    group: str = option(readers.text, "django_mq")


KINDS: Mapping[str, type[Inbox]] = {
    "amqp": AmqpInbox,
    "kafka": KafkaInbox,
    "nats": NatsInbox,
    "redis": RedisInbox,
}


def read_inboxes(raw: Mapping[Any, Any], errors: list[SettingError]) -> Mapping[str, Inbox]:
    """Return the inboxes in the value of INBOXES, by name; append the errors to `errors`."""
    return MappingProxyType(read_all("INBOXES", KINDS, ("url", "source"), raw, errors))
