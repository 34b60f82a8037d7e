"""Inbox of a stream of Redis or Valkey: a consumer group, whose pending entries come again."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from os import getpid
from time import monotonic
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError

from django_mq.conf.inboxes import RedisInbox
from django_mq.contrib.relays.incoming import Incoming
from django_mq.contrib.relays.links import Source, away_after
from django_mq.contrib.relays.redis import NO_RETRY

#: Seconds after which entries are taken over from a consumer that has not acked them.
TAKE_OVER_AFTER = 60.0
#: Seconds after which a consumer that holds no entry is removed: each process has its own name.
FORGET_AFTER = 24 * 3600.0

_away = partial(away_after, RedisError)


class RedisSource(Source):
    """Reads entries of a stream for one consumer of a group."""

    def __init__(self, inbox: RedisInbox) -> None:
        self._inbox = inbox
        self._consumer = f"{socket.gethostname()}-{getpid()}"
        self._looked_over = float("-inf")
        self._has_own = True
        self._client = redis.Redis.from_url(
            inbox.url,
            socket_timeout=inbox.timeout + 1,
            socket_connect_timeout=inbox.timeout,
            retry=NO_RETRY,
        )
        with _away():
            try:
                self._client.xgroup_create(inbox.source, inbox.group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
            with suppress(ResponseError):  # the user may not look
                self._forget_consumers()

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        with _away():
            entries = self._own(limit) or self._taken_over(limit)
            if not entries:
                found: Any = self._client.xreadgroup(
                    self._inbox.group,
                    self._consumer,
                    {self._inbox.source: ">"},
                    count=limit,
                    block=int(seconds * 1000),
                )
                entries = _entries_of(found)
        return [_incoming(id, fields) for id, fields in entries]

    def ack(self, batch: Sequence[Incoming]) -> None:
        with _away():
            self._client.xack(
                self._inbox.source, self._inbox.group, *(each.token for each in batch)
            )

    def close(self) -> None:
        self._client.close()

    def _forget_consumers(self) -> None:
        """Remove the consumers of processes that ended long ago, unless one holds an entry."""
        for each in self._client.xinfo_consumers(self._inbox.source, self._inbox.group):
            if each["pending"] == 0 and each["idle"] > FORGET_AFTER * 1000:
                self._client.xgroup_delconsumer(self._inbox.source, self._inbox.group, each["name"])

    def _own(self, limit: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries that this consumer got before its connection was lost."""
        if not self._has_own:
            return []
        found = self._client.xreadgroup(
            self._inbox.group, self._consumer, {self._inbox.source: "0"}, count=limit
        )
        entries = _entries_of(found)
        if trimmed := [id for id, fields in entries if not fields]:  # no longer in the stream
            self._client.xack(self._inbox.source, self._inbox.group, *trimmed)
        self._has_own = bool(entries)
        return [(id, fields) for id, fields in entries if fields]

    def _taken_over(self, limit: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries that a consumer got long ago and did not ack; it may be gone."""
        if monotonic() - self._looked_over < TAKE_OVER_AFTER / 2:
            return []
        answer: Any = self._client.xautoclaim(
            self._inbox.source,
            self._inbox.group,
            self._consumer,
            min_idle_time=int(TAKE_OVER_AFTER * 1000),
            count=limit,
        )
        entries = [(id, fields) for id, fields in answer[1] if fields]
        if not entries:
            self._looked_over = monotonic()
        return entries


def _entries_of(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of one stream: RESP3 answers with a dict, RESP2 with a list of pairs."""
    if not found:
        return []
    if isinstance(found, dict):
        [parts] = found.values()
        return [entry for part in parts for entry in part]
    [(_, entries)] = found
    return list(entries)


def _incoming(id: bytes, fields: dict[bytes, bytes]) -> Incoming:
    headers = {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for name, value in fields.items()
        if name != b"data"
    }
    content_type = headers.pop("content-type", "")
    has_body = b"data" in fields or any(name.startswith("ce_") for name in headers)
    return Incoming(
        fields.get(b"data", b""),
        headers,
        content_type,
        id.decode(),
        token=id,
        flaw="" if has_body else "its entry has no field 'data'",
    )
