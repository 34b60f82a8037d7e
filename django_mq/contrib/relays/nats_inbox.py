"""Inbox of a subject of NATS JetStream, with a durable pull consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nats.js.errors import APIError, NotFoundError

from django_mq.conf.inboxes import NatsInbox
from django_mq.contrib.relays.incoming import Incoming
from django_mq.contrib.relays.links import BrokerAway, Source
from django_mq.contrib.relays.loops import ClientLoop
from django_mq.contrib.relays.nats import LOST, NoStream, connect


class NatsSource(Source):
    """Fetches messages of one durable consumer."""

    def __init__(self, name: str, inbox: NatsInbox) -> None:
        self._inbox = inbox
        self._loop = ClientLoop(inbox.timeout + 1)
        try:
            with _away():
                self._client = self._loop.run(connect(inbox.url, inbox.timeout))
                self._subscription = self._loop.run(self._subscribe())
        except BrokerAway:
            self._loop.close()
            raise

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        with _away():
            return [_incoming(each) for each in self._loop.run(self._fetch(limit, seconds))]

    def ack(self, batch: Sequence[Incoming]) -> None:
        with _away():
            self._loop.run(self._ack_all(batch))

    def close(self) -> None:
        with suppress(*LOST):
            self._loop.run(self._client.close())
        self._loop.close()

    async def _subscribe(self) -> Any:
        stream = self._client.jetstream(timeout=self._inbox.timeout)
        try:
            name = await stream.find_stream_name_by_subject(self._inbox.source)
        except NotFoundError as error:
            raise BrokerAway(str(NoStream(self._inbox.source))) from error
        return await stream.pull_subscribe(
            self._inbox.source, durable=self._inbox.group, stream=name
        )

    async def _fetch(self, limit: int, seconds: float) -> list[Any]:
        if not self._client.is_connected:
            raise ConnectionError("the connection is lost")
        try:
            return list(await self._subscription.fetch(limit, timeout=seconds))
        except TimeoutError:
            return []

    async def _ack_all(self, batch: Sequence[Incoming]) -> None:
        await asyncio.gather(*(each.token.ack_sync(self._inbox.timeout) for each in batch))


def _incoming(message: Any) -> Incoming:
    headers = dict(message.headers or {})
    content_type = headers.pop("Content-Type", "") or headers.get("ce-datacontenttype", "")
    place = message.metadata
    id = f"{place.stream}/{place.sequence.stream}"
    return Incoming(message.data, headers, content_type, id, token=message)


@contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except (*LOST, APIError, NotFoundError) as error:
        raise BrokerAway(repr(error)) from error
