"""Relay to a stream of Redis or Valkey: an XADD for each message; the entry's id confirms it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_mq.conf.relays import RedisDestination
from django_mq.contrib.relays.envelope import Outgoing
from django_mq.contrib.relays.links import BrokerAway, away_after, named

#: The relay retries, and the inbox has to know of a lost connection.
NO_RETRY = Retry(NoBackoff(), 0)
#: Errors of the server rather than of a message.
AWAY = (
    exceptions.AuthenticationError,
    exceptions.BusyLoadingError,
    exceptions.ConnectionError,
    exceptions.MasterDownError,
    exceptions.NoPermissionError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TimeoutError,
)
#: The beginnings of further such errors, for which redis-py has no class.
AWAY_TEXTS = ("BUSY ", "CLUSTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN")


class RedisLink:
    """Adds messages to streams, in one round trip for each batch."""

    def __init__(self, destination: RedisDestination) -> None:
        self._to = destination
        self._client = redis.Redis.from_url(
            destination.url,
            socket_timeout=destination.timeout,
            socket_connect_timeout=destination.timeout,
            retry=NO_RETRY,
        )
        self._client.connection_pool.make_connection()  # refuses options that it does not know

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        pipeline = self._client.pipeline(transaction=False)
        for message in batch:
            fields: dict[Any, Any] = {
                **message.headers("ce_"),
                "content-type": message.content_type,
                "data": message.body,
            }
            stream = named(self._to.stream, message)
            pipeline.xadd(stream, fields, maxlen=self._to.maxlen, approximate=True)
        with away_after(exceptions.RedisError):
            answers = pipeline.execute(raise_on_error=False)
        for message, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception) and _is_of_the_server(answer):
                yield message, BrokerAway(str(answer))
            else:
                yield message, answer if isinstance(answer, Exception) else None

    def close(self) -> None:
        self._client.close()


def _is_of_the_server(error: Exception) -> bool:
    if isinstance(error, exceptions.NoPermissionError):
        return " key" not in str(error)  # the login may use no stream, or not this one
    return isinstance(error, AWAY) or str(error).startswith(AWAY_TEXTS)
