"""Relay to a stream of NATS JetStream, whose ack confirms each message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

import nats
from nats.aio.client import Client
from nats.errors import BadSubjectError, MaxPayloadError
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from django_mq.conf.relays import NatsDestination
from django_mq.contrib.relays.envelope import EVENT, Outgoing, percent_encoded
from django_mq.contrib.relays.links import BrokerAway, named
from django_mq.contrib.relays.loops import ClientLoop


class NoStream(LookupError):
    """No stream has the subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"no JetStream stream has the subject {subject}: create one")


#: Errors of a message rather than of the server.
OF_MESSAGE = (APIError, BadSubjectError, MaxPayloadError, ValueError, NoStream)
LOST = (NatsError, OSError, asyncio.TimeoutError)


async def connect(
    url: str, timeout: float, *, on_closed: Callable[[], Awaitable[None]] | None = None
) -> Client:
    """Return a connected client, which does not reconnect by itself."""
    return await nats.connect(
        url,
        connect_timeout=max(int(timeout), 1),
        allow_reconnect=False,
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
        error_cb=_ignore,
        closed_cb=on_closed,
    )


class NatsLink:
    """Publishes the messages of a batch at once, each with an ack of its own."""

    def __init__(self, destination: NatsDestination) -> None:
        self._to = destination
        self._loop = ClientLoop(destination.timeout + 1)
        self._publishing: list[asyncio.Task[Exception | None]] = []
        try:
            self._client = self._loop.run(
                connect(destination.url, destination.timeout, on_closed=self._give_up)
            )
        except LOST as error:
            self._loop.close()
            raise BrokerAway(repr(error)) from error
        except BaseException:
            self._loop.close()
            raise
        self._stream = self._client.jetstream(timeout=destination.timeout)

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        try:
            answers = self._loop.run(self._publish_all(batch))
        except LOST as error:
            raise BrokerAway(repr(error)) from error
        away: Exception | None = None
        for message, answer in zip(batch, answers, strict=True):
            if answer is None or (
                isinstance(answer, OF_MESSAGE) and not isinstance(answer, ServiceUnavailableError)
            ):
                yield message, answer
            else:
                away = answer
        if away is not None:
            raise BrokerAway(repr(away)) from away

    def close(self) -> None:
        with suppress(*LOST):
            self._loop.run(self._client.close())
        self._loop.close()

    async def _publish_all(self, batch: Sequence[Outgoing]) -> list[Exception | None]:
        self._publishing = [asyncio.ensure_future(self._publish(each)) for each in batch]
        return await asyncio.gather(*self._publishing)

    async def _give_up(self) -> None:
        """Await no more acks: the connection is closed, and the client would await them in vain."""
        for each in self._publishing:
            each.cancel()

    async def _publish(self, message: Outgoing) -> Exception | None:
        headers = _headers(message)
        # The server counts headers, too, and hangs up if there are too many bytes.
        size = len(message.body) + sum(len(name) + len(headers[name]) + 4 for name in headers) + 12
        if size > self._client.max_payload:
            return MaxPayloadError()
        subject = named(self._to.subject, message)
        try:
            await self._stream.publish(subject, message.body, headers=headers)
        except NoStreamResponseError:
            return NoStream(subject)
        except asyncio.CancelledError:
            return ConnectionError("the connection was lost before the ack came")
        except Exception as error:
            return error
        return None


def _headers(message: Outgoing) -> dict[str, str]:
    """Return the headers by the NATS binding, and the id by which JetStream drops duplicates."""
    found = {name: percent_encoded(value) for name, value in message.headers("ce-").items()}
    if message.attributes:
        found["ce-datacontenttype"] = message.content_type
    elif message.content_type == EVENT:
        found["Content-Type"] = message.content_type
    # With the time: two projects with one source must not drop each other's messages.
    created = message.created_at.timestamp()
    found["Nats-Msg-Id"] = percent_encoded(f"{message.source}#{message.id}#{created:.6f}")
    return found


async def _ignore(error: Exception) -> None:
    """Keep the client from logging errors that the relay reports."""
