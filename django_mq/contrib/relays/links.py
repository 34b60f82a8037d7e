"""Connections to the broker of one destination, kept open between batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_mq.conf.broker_options import missing_package
from django_mq.conf.inboxes import Inbox
from django_mq.conf.relays import TYPE, Destination
from django_mq.contrib.relays.envelope import Outgoing
from django_mq.contrib.relays.incoming import Incoming
from django_mq.signals import worker_stopped

#: Seconds after which an unused connection is replaced: nobody answers its heartbeats.
MAX_IDLE = 20.0
#: The errors of clients for a URL or an option that they do not accept.
REFUSED = (ValueError, TypeError, AttributeError)


class BrokerAway(Exception):
    """The broker cannot be reached, or takes no messages now; this says nothing about a message."""


class NotTaken(BrokerAway):
    """The server got a message and did not take it, as if it were away; the message may be why."""


@contextmanager
def away_after(
    errors: type[Exception] | tuple[type[Exception], ...], text: Callable[[Exception], str] = str
) -> Iterator[None]:
    """Turn `errors` of the block into BrokerAway with `text(error)`."""
    try:
        yield
    except errors as error:
        raise BrokerAway(text(error)) from error


class BrokerLink(Protocol):
    """A connection to a broker."""

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        """Publish messages; yield each with None when the broker has confirmed it, or its error.

        Yields or raises BrokerAway; messages with it, or not yielded, may have arrived or not.
        """

    def close(self) -> None:
        """Close the connection, whatever its state."""


class Source(Protocol):
    """A consumer of a broker; every method raises BrokerAway."""

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        """Return up to `limit` messages; wait up to `seconds` for the first."""

    def ack(self, batch: Sequence[Incoming]) -> None:
        """Confirm all messages of the batch that `receive()` returned last."""

    def keep_alive(self) -> None:
        """Tell the broker that the consumer lives, while it waits for something else.

        Most brokers need nothing: they deliver the messages again, to this or another consumer.
        """

    def close(self) -> None:
        """Close the connection, whatever its state; messages that were not acked come again."""


class Kind(NamedTuple):
    """How to reach one kind of broker.

    `stays_open`: it has a connection, which may have been lost since its last use. `keeps_order`:
    the broker itself keeps the order of a key, so several of its messages may be on their way.
    """

    link: str
    source: str = ""
    keeps_order: bool = False
    stays_open: bool = True


_HERE = "django_mq.contrib.relays"
KINDS = {
    "amqp": Kind(f"{_HERE}.amqp.AmqpLink", f"{_HERE}.amqp_inbox.AmqpSource"),
    "kafka": Kind(f"{_HERE}.kafka.KafkaLink", f"{_HERE}.kafka_inbox.KafkaSource", keeps_order=True),
    "nats": Kind(f"{_HERE}.nats.NatsLink", f"{_HERE}.nats_inbox.NatsSource"),
    "redis": Kind(f"{_HERE}.redis.RedisLink", f"{_HERE}.redis_inbox.RedisSource"),
    "webhook": Kind(f"{_HERE}.webhook.WebhookLink", stays_open=False),
}


def open_link(destination: Destination) -> BrokerLink:
    """Return a new connection. Raises BrokerAway, also for an option that the client refuses.

    Raises ImproperlyConfigured without its package.
    """
    if missing := missing_package(destination.kind):
        raise ImproperlyConfigured(f"a relay of the kind {destination.kind!r}: {missing}")
    try:
        link: BrokerLink = import_string(KINDS[destination.kind].link)(destination)
    except REFUSED as error:  # the messages are not at fault: they wait for the right option
        raise BrokerAway(refused(error)) from error
    return link


def open_source(name: str, inbox: Inbox) -> Source:
    """Return a consumer of the inbox `name`.

    Raises BrokerAway, and ImproperlyConfigured without its package or for an option that the client
    refuses.
    """
    if missing := missing_package(inbox.kind):
        raise ImproperlyConfigured(f"an inbox of the kind {inbox.kind!r}: {missing}")
    try:
        source: Source = import_string(KINDS[inbox.kind].source)(inbox)
    except REFUSED as error:
        raise ImproperlyConfigured(f"DJANGO_MQ['INBOXES'][{name!r}]: {refused(error)}") from error
    return source


def refused(error: Exception) -> str:
    """Return the text for an option that a client refuses; mostly it is a part of the URL."""
    return f"the client refuses its options: {type(error).__name__}: {error}"


class LinkPool:
    """The open connections to one destination; each is used by one thread at a time.

    They are closed when a worker of the process stops.
    """

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self._lock = threading.Lock()
        self._idle: list[tuple[BrokerLink, float]] = []
        self._process = os.getpid()
        worker_stopped.connect(self._close_idle)

    def take(self) -> tuple[BrokerLink, bool]:
        """Return a connection, and whether it was used before. Raises BrokerAway."""
        for link, since in self._popped():
            if monotonic() - since < MAX_IDLE:
                return link, True
            link.close()
        return open_link(self.destination), False

    def give_back(self, link: BrokerLink) -> None:
        """Keep a connection that works for the next batch."""
        with self._lock:
            self._idle.append((link, monotonic()))

    def _close_idle(self, **_: object) -> None:
        for link, _since in self._popped():
            link.close()

    def _popped(self) -> Iterator[tuple[BrokerLink, float]]:
        while True:
            with self._lock:
                if self._process != os.getpid():  # the parent's, and not to be closed here
                    self._idle, self._process = [], os.getpid()
                if not self._idle:
                    return
                found = self._idle.pop()
            yield found


def named(pattern: str, message: Outgoing) -> str:
    """Return the name of a topic, subject, stream or routing key for a message."""
    return pattern.replace(TYPE, message.type)
