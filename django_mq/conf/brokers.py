"""Destinations of relays: what `DJANGO_MQ["RELAYS"]` says of each broker, read and checked."""
# ruff: noqa: RUF009  (`_option` is `dataclasses.field`)

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from django_mq.conf import readers
from django_mq.conf.readers import (
    Reader,
    SecretValueError,
    SettingError,
    duration,
    flag,
    integer,
    one_of,
    optional,
    read_fields,
    setting_error,
)

Envelope = Literal["binary", "structured", "raw"]
#: In the name of a topic, subject, stream or routing key, this stands for the message's type.
TYPE = "{type}"


def _option(read: Reader, default: Any = MISSING, *, make: Any = MISSING) -> Any:
    return field(default=default, default_factory=make, metadata={"read": read})


def _secret(read: Reader, default: Any = MISSING, *, make: Any = MISSING) -> Any:
    """Return an option whose value may have a password: no repr and no error shows it."""

    def read_secret(value: object) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise SecretValueError(error) from None

    return field(default=default, default_factory=make, repr=False, metadata={"read": read_secret})


def _url(*schemes: str) -> Reader:
    """Return a reader of URLs with one of these schemes."""

    def read(value: object) -> str:
        try:
            given = urlsplit(readers.text(value))
            if given.scheme in schemes and (given.netloc or given.path.strip("/")):
                return str(value)
        except ValueError:
            pass
        raise ValueError(f"must be a URL that begins with {' or '.join(schemes)}, and ://")

    return read


def _text_or_empty(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _texts(value: object) -> tuple[str, ...]:
    """Read one text, or several."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(found) or not _are_texts(found):
        raise ValueError("must be a text, or a list of texts, none of them empty")
    return tuple(found)


def _headers(value: object) -> Mapping[str, str]:
    found = readers.mapping(value)
    if not (_are_texts(found) and _are_texts(found.values())):
        raise ValueError("must be a dict of texts")
    return MappingProxyType(dict(found))


def _config(value: object) -> Mapping[str, Any]:
    found = readers.mapping(value)
    if not _are_texts(found):
        raise ValueError("must be a dict whose keys are texts")
    return MappingProxyType(dict(found))


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(each, str) for each in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The options of every destination.

    `source`: the CloudEvents source, a URI that is unique to this project. `timeout`: seconds that
    the broker has to accept a connection, and to confirm messages that were sent together.
    """

    kind: str = _option(readers.text)
    url: str = _secret(readers.text)
    envelope: Envelope = _option(one_of("binary", "structured", "raw"), "binary")
    source: str | None = _option(optional(readers.text), None)
    timeout: float = _option(duration(), 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpDestination(Destination):
    """RabbitMQ, and other brokers of AMQP 0-9-1.

    `mandatory`: a message that no queue of the broker receives counts as an error.
    """

    url: str = _secret(_url("amqp", "amqps"))
    exchange: str = _option(_text_or_empty, "amq.topic")
    routing_key: str = _option(readers.text, TYPE)
    mandatory: bool = _option(flag, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaDestination(Destination):
    """Kafka. `config`: options of librdkafka, such as those of TLS and SASL."""

    url: str = _secret(_url("kafka"))
    topic: str = _option(readers.text, TYPE)
    config: Mapping[str, Any] = _secret(_config, make=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsDestination(Destination):
    """NATS with JetStream."""

    url: str = _secret(_url("nats", "tls", "ws", "wss"))
    subject: str = _option(readers.text, TYPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisDestination(Destination):
    """A stream of Redis or Valkey. `maxlen`: about how many entries the stream keeps."""

    url: str = _secret(_url("redis", "rediss", "unix"))
    stream: str = _option(readers.text, TYPE)
    maxlen: int | None = _option(optional(integer(1)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDestination(Destination):
    """An HTTP server, which gets each message in a POST request.

    `secret`: the key of the signature, of the Standard Webhooks specification; several while one
    replaces another. `headers`: further headers, such as `Authorization`. `concurrency`: how many
    requests of one thread of a worker may be open.
    """

    url: str = _secret(_url("http", "https"))
    secret: tuple[str, ...] = _secret(_texts, ())
    headers: Mapping[str, str] = _secret(_headers, make=dict)
    concurrency: int = _option(integer(1, 100), 8)


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
    """Return the destinations in the value of RELAYS, by name; append what is wrong to `errors`."""
    return MappingProxyType(_read_all("RELAYS", KINDS, raw, errors))


def _read_all(
    setting: str,
    kinds: Mapping[str, type[Any]],
    raw: Mapping[Any, Any],
    errors: list[SettingError],
) -> dict[str, Any]:
    found = {}
    for name, options in raw.items():
        where = f"DJANGO_MQ[{setting!r}][{name!r}]"
        before = len(errors)
        given = _checked(name, options, where, errors)
        kind = None if given is None else _kind(kinds, given, where, errors)
        if given is None or kind is None:
            continue
        values = read_fields(kind, given, str.lower, where, errors)
        if "url" not in given:
            errors.append(SettingError(where, "has no 'url'."))
        if len(errors) == before:
            found[name] = kind(**values)
    return found


def _checked(
    name: object, options: object, where: str, errors: list[SettingError]
) -> Mapping[str, Any] | None:
    try:
        readers.name(name)
    except ValueError as error:
        errors.append(SettingError(where, f"has a bad name: it {error}."))
    try:
        found: Mapping[str, Any] = readers.mapping(options)
    except ValueError as error:  # it may be a URL with a password
        errors.append(setting_error(where, options, SecretValueError(error)))
        return None
    return found


def _kind(
    kinds: Mapping[str, type[Any]],
    given: Mapping[str, Any],
    where: str,
    errors: list[SettingError],
) -> type[Any] | None:
    read: Callable[[Any], Any] = one_of(*kinds)
    try:
        return kinds[read(given.get("kind"))]
    except ValueError as error:
        errors.append(setting_error(f"{where}['kind']", given.get("kind"), error))
        return None
