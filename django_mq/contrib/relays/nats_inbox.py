"""Inbox of a subject of NATS JetStream, with a durable pull consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Any

from nats.aio.client import Client
from nats.js.errors import APIError, NotFoundError

from django_mq.conf.inboxes import NatsInbox
from django_mq.contrib.relays.incoming import Incoming
from django_mq.contrib.relays.links import BrokerAway, Source, away_after
from django_mq.contrib.relays.loops import ClientLoop
from django_mq.contrib.relays.nats_client import LOST, NoStream, connect, reason

#: Seconds between two questions whether the consumer still exists, while it delivers nothing.
CHECK_SECONDS = 5.0


class NatsSource(Source):
    """Fetches messages of one durable consumer."""

    def __init__(self, inbox: NatsInbox) -> None:
        self._inbox = inbox
        self._loop = ClientLoop(inbox.timeout + 1)
        self._client: Client | None = None
        self._checked_at = monotonic()
        try:
            with self._away():
                self._client = self._loop.run(connect(inbox.url, inbox.timeout))
                self._subscription = self._loop.run(self._subscribe(self._client))
        except BaseException:
            self.close()
            raise

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        with self._away():
            return [_incoming(each) for each in self._loop.run(self._fetch(limit, seconds))]

    def ack(self, batch: Sequence[Incoming]) -> None:
        with self._away():
            self._loop.run(self._ack_all(batch))

    def close(self) -> None:
        with suppress(*LOST):
            if self._client is not None:
                self._loop.run(self._client.close())
        self._loop.close()

    async def _subscribe(self, client: Client) -> Any:
        stream = client.jetstream(timeout=self._inbox.timeout)
        try:
            name = await stream.find_stream_name_by_subject(self._inbox.source)
        except NotFoundError as error:
            raise BrokerAway(str(NoStream(self._inbox.source))) from error
        group = self._inbox.group
        subscription = await stream.pull_subscribe(self._inbox.source, durable=group, stream=name)
        config = (await subscription.consumer_info()).config
        taken = getattr(config, "filter_subjects", None) or [config.filter_subject or ""]
        if taken not in ([""], [self._inbox.source]):
            raise BrokerAway(
                f"the durable consumer {group!r} of the stream {name} takes {', '.join(taken)}:"
                " give this inbox another 'group'"
            )
        return subscription

    async def _fetch(self, limit: int, seconds: float) -> list[Any]:
        assert self._client is not None  # noqa: S101
        if not self._client.is_connected:
            raise ConnectionError("the connection is lost")
        try:
            return list(await self._subscription.fetch(limit, timeout=seconds))
        except TimeoutError:
            if monotonic() >= self._checked_at + CHECK_SECONDS:
                self._checked_at = monotonic()
                await self._check(self._client)
            return []

    async def _check(self, client: Client) -> None:
        """Raise an error if nothing can come: a fetch only ends without a message then, too."""
        await self._subscription.consumer_info()
        if client.last_error is not None:  # the login may not fetch
            raise client.last_error

    def _away(self) -> AbstractContextManager[None]:
        return away_after(
            (*LOST, APIError, NotFoundError), lambda error: reason(error, self._inbox.timeout)
        )

    async def _ack_all(self, batch: Sequence[Incoming]) -> None:
        await asyncio.gather(*(each.token.ack_sync(self._inbox.timeout) for each in batch))


def _incoming(message: Any) -> Incoming:
    headers = dict(message.headers or {})
    content_type = headers.pop("Content-Type", "") or headers.get("ce-datacontenttype", "")
    place = message.metadata
    id = f"{place.stream}/{place.sequence.stream}"
    return Incoming(message.data, headers, content_type, id, token=message)
