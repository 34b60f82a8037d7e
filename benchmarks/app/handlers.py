"""Handlers under measurement. What they record costs less than half a microsecond a call."""

from time import monotonic, sleep

from django.db import transaction
from django.db.models import F

from benchmarks.app.models import Counter
from benchmarks.app.recording import recorder
from django_mq import Delivery, handler

QUEUE = "bench"


@handler("bench.noop", queue=QUEUE, name="bench.noop")
def noop(delivery: Delivery) -> None:
    """Nothing. The last one has the time of its commit noted, by a hook of its own."""
    if recorder.called(delivery.id):
        transaction.on_commit(recorder.committed)


@handler("bench.timed", queue=QUEUE, name="bench.timed")
def timed(delivery: Delivery) -> None:
    """Note when it started."""
    recorder.started(delivery.id, monotonic())


@handler("bench.count", queue=QUEUE, name="bench.count")
def count(delivery: Delivery) -> None:
    """Update one of a few rows that everybody updates."""
    recorder.called(delivery.id)
    Counter.objects.filter(pk=delivery.payload["counter"]).update(value=F("value") + 1)
    transaction.on_commit(recorder.committed)


@handler("bench.long", queue=QUEUE, name="bench.long")
def long(delivery: Delivery) -> None:
    """Take as many seconds as the message says."""
    recorder.started(delivery.id, monotonic())
    sleep(delivery.payload["seconds"])
    recorder.ended()
