"""Relay to Kafka, with an idempotent producer; the delivery report of each record acks it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from confluent_kafka import KafkaError, KafkaException, Producer

from django_mq.conf.relays import KafkaDestination
from django_mq.contrib.relays.envelope import Outgoing
from django_mq.contrib.relays.links import BrokerAway, named

#: Errors of the cluster rather than of a record.
AWAY = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._FATAL,  # this producer publishes nothing more
    KafkaError._MSG_TIMED_OUT,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._PURGE_QUEUE,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
}
logger = logging.getLogger("django_mq.relays.kafka")


class KafkaLink:
    """Produces a batch of records, and waits for their reports."""

    def __init__(self, destination: KafkaDestination) -> None:
        self._to = destination
        self._producer = Producer(
            {
                "bootstrap.servers": urlsplit(destination.url).netloc,
                "message.timeout.ms": int(destination.timeout * 1000),
                # Sooner than the timeout, whose error would say less.
                "topic.metadata.propagation.max.ms": int(destination.timeout * 500),
                "linger.ms": 0,
                "log_level": 2,  # an outage is logged once, by the relay
                **destination.config,
                "acks": "all",
                "enable.idempotence": True,
            },
            logger=logger,
        )

    def send(self, batch: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, Exception | None]]:
        reports: dict[str, KafkaError | None] = {}
        refused: dict[str, Exception] = {}
        for message in batch:
            try:
                self._produce(message, reports)
            except KafkaException as error:
                reports[message.id] = error.args[0]
            except (BufferError, TypeError, ValueError) as error:
                refused[message.id] = error
        self._producer.flush(self._to.timeout + 1)  # until each has its report, or timed out
        for message in batch:
            report = reports.get(message.id, _NO_REPORT)
            if message.id in refused:
                yield message, refused[message.id]
            elif report is None:
                yield message, None
            elif report.code() in AWAY:
                yield message, BrokerAway(report.str())
            else:
                yield message, KafkaException(report)

    def close(self) -> None:
        self._producer.purge()
        self._producer.poll(0)

    def _produce(self, message: Outgoing, reports: dict[str, KafkaError | None]) -> None:
        headers: list[tuple[str, str]] = list(message.headers("ce_").items())

        def report(error: KafkaError | None, record: Any) -> None:
            reports[message.id] = error

        self._producer.produce(
            named(self._to.topic, message),
            message.body,
            key=message.key,
            headers=[("content-type", message.content_type), *headers],
            timestamp=int(message.created_at.timestamp() * 1000),
            on_delivery=report,
        )


_NO_REPORT = KafkaError(KafkaError._TIMED_OUT)
