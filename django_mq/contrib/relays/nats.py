"""Relay to a stream of NATS JetStream, whose ack confirms each message."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from nats.errors import BadSubjectError, MaxPayloadError
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from django_mq.conf.relays import NatsDestination
from django_mq.contrib.relays.envelope import EVENT, Outgoing, percent_encoded
from django_mq.contrib.relays.links import BrokerAway, away_after, named
from django_mq.contrib.relays.loops import ClientLoop
from django_mq.contrib.relays.nats_client import LOST, NoStream, connect, reason


class NotPermitted(Exception):
    """The login may not publish to the subject."""


#: Errors of a message rather than of the server.
OF_MESSAGE = (APIError, BadSubjectError, MaxPayloadError, ValueError, NoStream, NotPermitted)
#: The server's error for a subject to which the login may not publish; it is in lower case.
_FORBIDDEN = re.compile(r'permissions violation for publish to "([^"]+)"')


class NatsLink:
    """Publishes the messages of a batch at once, each with an ack of its own."""

    def __init__(self, destination: NatsDestination) -> None:
        self._to = destination
        self._loop = ClientLoop(destination.timeout + 1)
        # The publications that wait for their acks, with their subjects.
        self._publishing: dict[asyncio.Task[Exception | None], str] = {}
        # By subject in lower case: why the server refuses it.
        self._forbidden: dict[str, str] = {}
        try:
            with away_after(LOST, self._reason):
                self._client = self._loop.run(
                    connect(
                        destination.url,
                        destination.timeout,
                        on_error=self._heard,
                        on_closed=self._give_up,
                    )
                )
        except BaseException:
            self._loop.close()
            raise
        self._stream = self._client.jetstream(timeout=destination.timeout)

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        with away_after(LOST, self._reason):
            answers = self._loop.run(self._publish_all(batch))
        for message, answer in zip(batch, answers, strict=True):
            if answer is None or (
                isinstance(answer, OF_MESSAGE) and not isinstance(answer, ServiceUnavailableError)
            ):
                yield message, answer
            else:
                yield message, BrokerAway(self._reason(answer))

    def close(self) -> None:
        with suppress(*LOST):
            self._loop.run(self._client.close())
        self._loop.close()

    def _reason(self, error: Exception) -> str:
        return reason(error, self._to.timeout)

    async def _publish_all(self, batch: Sequence[Outgoing]) -> list[Exception | None]:
        subjects = [named(self._to.subject, each) for each in batch]
        self._publishing = {
            asyncio.ensure_future(self._publish(message, subject)): subject
            for message, subject in zip(batch, subjects, strict=True)
        }
        return await asyncio.gather(*self._publishing)

    def _heard(self, error: Exception) -> None:
        """Await no more acks for a subject that the login may not use: none will come."""
        if found := _FORBIDDEN.search(str(error)):
            self._forbidden[found[1]] = str(error)
            for each, subject in self._publishing.items():
                if subject.lower() == found[1]:
                    each.cancel()

    async def _give_up(self) -> None:
        """Await no more acks: the connection is closed, and the client would await them in vain."""
        for each in self._publishing:
            each.cancel()

    async def _publish(self, message: Outgoing, subject: str) -> Exception | None:
        headers = _headers(message)
        # The server counts headers, too, and hangs up if there are too many bytes.
        size = len(message.body) + sum(len(name) + len(headers[name]) + 4 for name in headers) + 12
        if size > self._client.max_payload:
            return MaxPayloadError()
        try:
            await self._stream.publish(subject, message.body, headers=headers)
        except NoStreamResponseError:
            return NoStream(subject)
        except asyncio.CancelledError:
            if subject.lower() in self._forbidden:
                return NotPermitted(self._forbidden[subject.lower()])
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
