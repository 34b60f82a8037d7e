"""Handlers under measurement. Their recording costs less than half a microsecond per call."""

import asyncio
from collections.abc import Sequence
from time import monotonic, sleep

from django.db import connection
from django.db.models import F

from benchmarks.app.models import Counter, Entry
from benchmarks.app.recording import recorder
from benchmarks.bare import WRITE
from django_mq import Delivery, handler

QUEUE = "bench"
#: The queue of coroutines. They have a limit at once, which would also limit the claims of QUEUE.
PAUSES = "pauses"
#: The queues of a worker with many queues.
SPREAD = tuple(f"bench{number}" for number in range(1000))
#: How many handlers get a copy of a broadcast.
FAN = 5
#: Seconds that a coroutine waits.
PAUSE = 0.05


@handler("bench.noop", queue=QUEUE, name="bench.noop")
def noop(delivery: Delivery) -> None:
    """Nothing."""
    recorder.called(delivery.id)


@handler("bench.spread", queues=SPREAD, name="bench.spread")
def spread(delivery: Delivery) -> None:
    """Do nothing, in any of the many queues."""
    noop(delivery)


@handler("bench.timed", queue=QUEUE, name="bench.timed")
def timed(delivery: Delivery) -> None:
    """Note when it started."""
    recorder.started(delivery.id, monotonic())


@handler("bench.count", queue=QUEUE, name="bench.count")
def count(delivery: Delivery) -> None:
    """Update one of a few rows that all handlers update."""
    recorder.called(delivery.id)
    Counter.objects.filter(pk=delivery.payload["counter"]).update(value=F("value") + 1)


@handler("bench.write", queue=QUEUE, name="bench.write")
def write(delivery: Delivery) -> None:
    """Write one row, in the shortest way that Django has."""
    with connection.cursor() as cursor:
        cursor.execute(WRITE, (delivery.id,))
    recorder.called(delivery.id)


@handler("bench.orm", queue=QUEUE, name="bench.orm")
def orm(delivery: Delivery) -> None:
    """Load, update and insert a row, like many real handlers."""
    counter = Counter.objects.get(pk=delivery.payload["counter"])
    counter.value = F("value") + 1
    counter.save()
    Entry.objects.create(message=delivery.id, note="handled")
    recorder.called(delivery.id)


@handler("bench.pause", queue=PAUSES, name="bench.pause")
async def pause(delivery: Delivery) -> None:
    """Sleep, as a handler that waits for another service."""
    await asyncio.sleep(PAUSE)
    recorder.called(delivery.id)


@handler("bench.list", queue=QUEUE, name="bench.list", batch=True)
def several(deliveries: Sequence[Delivery]) -> None:
    """Do nothing with a list of messages."""
    for delivery in deliveries:
        recorder.called(delivery.id)


def _subscribe(copy: int) -> None:
    @handler("bench.fan", queue=QUEUE, name=f"bench.fan.{copy}")
    def fan(delivery: Delivery) -> None:
        recorder.called(delivery.id)


for copy in range(FAN):
    _subscribe(copy)


@handler("bench.long", queue=QUEUE, name="bench.long")
def long(delivery: Delivery) -> None:
    """Run for the number of seconds in the message."""
    recorder.started(delivery.id, monotonic())
    sleep(delivery.payload["seconds"])
    recorder.ended()


@handler("bench.asleep", queue=QUEUE, name="bench.asleep", atomic=False)
def asleep(delivery: Delivery) -> None:
    """Sleep as many seconds as the message says, under the lease alone: no row stays locked."""
    sleep(delivery.payload["seconds"])
