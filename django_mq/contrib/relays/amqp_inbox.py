"""Inbox of a queue of RabbitMQ, or another broker of AMQP 0-9-1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import pika

from django_mq.conf.inboxes import AmqpInbox
from django_mq.contrib.relays.amqp_client import LOST, parameters
from django_mq.contrib.relays.envelope import text_of
from django_mq.contrib.relays.incoming import Incoming
from django_mq.contrib.relays.links import BrokerAway, Source, away_after

#: Seconds to wait for a further message of a batch.
NEXT_SECONDS = 0.02

_away = partial(away_after, LOST, repr)


class Properties(pika.BasicProperties):  # type: ignore[misc]  # pika has no types
    """The properties of a message; `flaw` says why they could not be read.

    A header may have a time beyond Python's years, or tables nested too deeply for Python. An error
    while the client decodes it would end the connection, and the message would come again for ever.
    The client has no option for such a class, so this is the one of all its connections in the
    process.
    """

    flaw = ""

    def decode(self, encoded: bytes, offset: int = 0) -> pika.BasicProperties:
        """Read the properties from a frame, as far as that is possible."""
        try:
            return super().decode(encoded, offset)
        except Exception as error:
            self.flaw = f"its properties cannot be decoded: {type(error).__name__}"
            return self


pika.spec.props[pika.BasicProperties.INDEX] = Properties  # the client decodes with this class


class AmqpSource(Source):
    """Gets messages from one queue."""

    def __init__(self, inbox: AmqpInbox) -> None:
        options = parameters(inbox.url, inbox.timeout)
        self._inbox = inbox
        with _away():
            self._connection = pika.BlockingConnection(options)
            self._channel = self._connection.channel()
            self._channel.basic_qos(prefetch_count=inbox.batch_size)

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        found: list[Incoming] = []
        deadline = monotonic() + seconds
        with _away():
            while len(found) < limit:
                wait = NEXT_SECONDS if found else max(deadline - monotonic(), 0.01)
                deliveries = self._channel.consume(self._inbox.source, inactivity_timeout=wait)
                delivery = next(deliveries, None)
                if delivery is None:
                    raise BrokerAway("the queue was deleted, or the broker ended the consumer")
                method, properties, body = delivery
                if method is None:
                    break
                found.append(_incoming(method.delivery_tag, properties, body))
        return found

    def ack(self, batch: Sequence[Incoming]) -> None:
        with _away():
            self._channel.basic_ack(batch[-1].token, multiple=True)

    def keep_alive(self) -> None:
        """Answer heartbeats; a closed connection would count as a delivery that failed."""
        with _away():
            self._connection.process_data_events(0)

    def close(self) -> None:
        with suppress(*LOST):
            self._connection.close()


def _incoming(tag: int, properties: Any, body: bytes) -> Incoming:
    return Incoming(
        body,
        {_text(name): _text(value) for name, value in _scalars(properties.headers or {})},
        _text(properties.content_type or ""),
        # Texts that are not UTF-8 are bytes.
        None if properties.message_id is None else _text(properties.message_id),
        token=tag,
        flaw=getattr(properties, "flaw", ""),
    )


def _scalars(headers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in headers.items() if not isinstance(value, dict | list))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else text_of(value)
