"""Inbox of a topic of Kafka; offsets are committed after the transaction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from django_mq.conf.inboxes import KafkaInbox
from django_mq.contrib.relays.incoming import Incoming
from django_mq.contrib.relays.links import Source, away_after

logger = logging.getLogger("django_mq.relays.kafka")

_away = partial(away_after, KafkaException)


class KafkaSource(Source):
    """Consumes a topic as a member of a group."""

    def __init__(self, inbox: KafkaInbox) -> None:
        self._lost: KafkaError | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": urlsplit(inbox.url).netloc,
                "auto.offset.reset": "earliest",
                "log_level": 2,  # an outage is logged once, by the inbox
                **inbox.config,
                "group.id": inbox.group,
                "enable.auto.commit": False,
                "error_cb": self._failed,
            },
            logger=logger,
        )
        self._inbox = inbox
        self._assigned = False
        self._consumer.subscribe([inbox.source], on_assign=self._assign)

    def receive(self, limit: int, seconds: float) -> list[Incoming]:
        if not self._assigned:  # the group takes seconds to let a member in
            seconds = self._inbox.timeout
        with _away():
            records = self._consume(limit, seconds)
            found = [_incoming(each) for each in records if each.error() is None]
            failed = [each.error() for each in records if each.error() is not None]
            if not found and (lost := self._lost or next(iter(failed), None)):
                self._lost = None
                raise KafkaException(lost)
        return found

    def ack(self, batch: Sequence[Incoming]) -> None:
        upto: dict[tuple[str, int], int] = {}
        for each in batch:
            topic, partition, offset = each.token
            upto[topic, partition] = max(upto.get((topic, partition), 0), offset + 1)
        offsets = [TopicPartition(*place, offset) for place, offset in upto.items()]
        with _away():
            self._consumer.commit(offsets=offsets, asynchronous=False)

    def close(self) -> None:
        with suppress(KafkaException, RuntimeError):
            self._consumer.close()

    def _consume(self, limit: int, seconds: float) -> list[Any]:
        """Return records; end without any once the partitions are assigned and empty."""
        deadline = monotonic() + seconds
        records: list[Any] = []
        assigned = self._assigned
        while not records and (wait := deadline - monotonic()) > 0:
            records = list(self._consumer.consume(limit, min(wait, 1.0)))
            if self._assigned and not assigned:
                assigned, deadline = True, min(deadline, monotonic() + 2.0)
        return records

    def _assign(self, consumer: object, partitions: object) -> None:
        self._assigned = True

    def _failed(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN or error.fatal():
            self._lost = error


def _incoming(record: Any) -> Incoming:
    place = record.topic(), record.partition(), record.offset()
    flaw = ""
    try:
        given = record.headers() or ()
    except UnicodeDecodeError:
        given, flaw = (), "the name of a header is not UTF-8"
    headers = {name: (value or b"").decode("utf-8", "replace") for name, value in given}
    key = record.key()
    return Incoming(
        record.value() or b"",
        headers,
        headers.pop("content-type", ""),
        "/".join(map(str, place)),
        key=None if key is None else key.decode("utf-8", "replace"),
        token=place,
        flaw=flaw,
    )
