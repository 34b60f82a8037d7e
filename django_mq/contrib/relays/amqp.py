"""Relay to RabbitMQ, or another broker of AMQP 0-9-1; publisher confirms ack each message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.channel import Channel
from pika.exceptions import ChannelClosed, ChannelWrongStateError, ConnectionWrongStateError
from pika.spec import Basic

from django_mq.conf.relays import AmqpDestination
from django_mq.contrib.relays.amqp_client import LOST, parameters
from django_mq.contrib.relays.envelope import Outgoing
from django_mq.contrib.relays.links import BrokerAway, away_after, named
from django_mq.contrib.relays.loops import ClientLoop

#: AMQP's reply code for an exchange that does not exist.
NOT_FOUND = 404
#: Bytes of a header frame besides the properties; larger ones make the broker hang up.
HEADER_FRAME = 32


class MessageRefused(Exception):
    """The broker did not take a message: no queue gets it, or it was not confirmed."""


class Unconfirmed(Exception):
    """The connection was lost, or the time is over, before the broker confirmed a message."""


class AmqpLink:
    """Publishes the messages of a batch at once, each with a confirm of its own."""

    def __init__(self, destination: AmqpDestination) -> None:
        self._to = destination
        options = parameters(destination.url, destination.timeout)
        self._loop = ClientLoop(destination.timeout + 1)
        self._connection: AsyncioConnection | None = None
        self._publisher: Publisher | None = None
        try:
            with away_after(LOST, repr):
                self._loop.run(self._connect(options))
        except BaseException:
            self.close()
            raise

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        with away_after(LOST, repr):
            answers = self._loop.run(self._publish_all(batch))
        # The broker closes the channel for one bad message, and does not say which.
        unclear: list[Outgoing] = []
        is_away = False
        for message in batch:
            answer = answers[message.id]
            if isinstance(answer, Unconfirmed) or _lacks_exchange(answer):
                is_away = True
                yield message, BrokerAway(getattr(answer, "reply_text", None) or str(answer))
            elif isinstance(answer, ChannelClosed) and len(batch) > 1:
                unclear.append(message)
            else:
                yield message, answer
        for message in () if is_away else unclear:
            yield from self.send([message])

    def close(self) -> None:
        with suppress(*LOST):
            if self._connection is not None and self._connection.is_open:
                self._connection.close()
                self._loop.run(asyncio.sleep(0))  # sends the frame
        self._loop.close()

    async def _connect(self, options: pika.URLParameters) -> None:
        opened: asyncio.Future[object] = self._loop.loop.create_future()

        def failed(connection: object, error: BaseException) -> None:
            if not opened.done():
                opened.set_exception(error)

        self._connection = AsyncioConnection(
            options,
            on_open_callback=opened.set_result,
            on_open_error_callback=failed,
            on_close_callback=self._lost,
            custom_ioloop=self._loop.loop,
        )
        await opened

    async def _publish_all(self, batch: Sequence[Outgoing]) -> dict[str, Exception | None]:
        if self._publisher is None or not self._publisher.channel.is_open:
            self._publisher = await self._open_channel()
        return await self._publisher.publish_all(self._to, batch)

    async def _open_channel(self) -> Publisher:
        assert self._connection is not None  # noqa: S101
        opened: asyncio.Future[Channel] = self._loop.loop.create_future()
        self._connection.channel(on_open_callback=opened.set_result)
        publisher = Publisher(await opened)
        confirming: asyncio.Future[Any] = self._loop.loop.create_future()
        publisher.channel.confirm_delivery(publisher.confirmed, confirming.set_result)
        await confirming
        return publisher

    def _lost(self, connection: object, error: BaseException) -> None:
        if self._publisher is not None:
            self._publisher.end(error)


def _lacks_exchange(answer: Exception | None) -> bool:
    """Return whether the exchange is missing, which is no message's fault."""
    return isinstance(answer, ChannelClosed) and answer.reply_code == NOT_FOUND


class Publisher:
    """A channel with confirms, and the answers that its messages wait for."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._published = 0
        self._waiting: dict[int, tuple[str, asyncio.Future[Exception | None]]] = {}
        self._unroutable: set[str] = set()
        channel.add_on_return_callback(self._returned)
        channel.add_on_close_callback(lambda _, error: self.end(error))

    async def publish_all(
        self, to: AmqpDestination, batch: Sequence[Outgoing]
    ) -> dict[str, Exception | None]:
        """Publish messages; return the error of each, None if it is confirmed."""
        answers: dict[str, asyncio.Future[Exception | None]] = {}
        for message in batch:
            answer = answers[message.id] = asyncio.get_running_loop().create_future()
            try:
                self._publish(to, message)
            except (ChannelWrongStateError, ConnectionWrongStateError):
                answer.set_result(Unconfirmed("the connection was lost"))
            except Exception as error:  # nothing was sent: the client cannot encode it
                answer.set_result(error)
            else:
                self._published += 1  # the broker counts likewise
                self._waiting[self._published] = message.id, answer
        await asyncio.wait(answers.values(), timeout=to.timeout)
        late = Unconfirmed(f"not confirmed within {to.timeout:g} s")
        return {id: answer.result() if answer.done() else late for id, answer in answers.items()}

    def confirmed(self, frame: Any) -> None:
        """Answer the messages that the broker has confirmed, or has not."""
        method = frame.method
        upto = method.delivery_tag
        tags = [tag for tag in self._waiting if tag <= upto] if method.multiple else [upto]
        for tag in tags:
            id, answer = self._waiting.pop(tag)
            error = None
            if not isinstance(method, Basic.Ack):
                error = MessageRefused("the broker did not confirm it")
            elif id in self._unroutable:
                error = MessageRefused("no queue of the broker is bound to its routing key")
            self._unroutable.discard(id)
            if not answer.done():
                answer.set_result(error)

    def end(self, error: BaseException) -> None:
        """Answer the messages that wait: the channel is closed, or the connection lost."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for _, answer in waiting:
            if not answer.done():
                lost = error if isinstance(error, ChannelClosed) else Unconfirmed(repr(error))
                answer.set_result(lost)

    def _returned(self, channel: object, method: object, properties: Any, body: object) -> None:
        self._unroutable.add(properties.message_id)  # its confirm comes next

    def _publish(self, to: AmqpDestination, message: Outgoing) -> None:
        headers = {f"cloudEvents_{name}": value for name, value in message.attributes.items()}
        properties = pika.BasicProperties(
            content_type=message.content_type,
            delivery_mode=2,  # kept on disk
            headers=headers,
            message_id=message.id,
            timestamp=int(message.created_at.timestamp()),
            type=message.type,
        )
        size = sum(map(len, properties.encode()))
        if size > self.channel.connection.params.frame_max - HEADER_FRAME:
            raise MessageRefused(f"its {size:,} bytes of headers do not fit into a frame")
        self.channel.basic_publish(
            to.exchange,
            named(to.routing_key, message),
            message.body,
            properties,
            mandatory=to.mandatory,
        )
