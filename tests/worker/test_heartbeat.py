"""A worker reports in its heartbeats how many of its threads and slots are in use."""

from __future__ import annotations

import asyncio
import threading

import pytest

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import WorkerHeartbeat
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start

pytestmark = pytest.mark.django_db(transaction=True)


def test_threads_and_slots_in_use(start: Start, gate: threading.Event) -> None:
    """On average over a second or more, in which one of each is in use from begin to end."""

    @handler("#", queue="mail", name="thread")
    def thread(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    @handler("#", queue="mail", name="slot")
    async def slot(delivery: Delivery) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)

    add(handler="thread")
    for _ in range(3):
        add(handler="slot")
    running = start(threads=4, async_slots=30)

    def in_use() -> tuple[int | None, float | None, int | None, float | None]:
        if (run := running.worker._run) is not None:
            run.parts.lease_keeper.request_heartbeat()
        return WorkerHeartbeat.objects.values_list(
            "threads", "threads_used", "slots", "slots_used"
        ).get()

    until(lambda: WorkerHeartbeat.objects.exists())
    first = in_use()
    assert (first[0], first[2]) == (4, 30)
    until(lambda: in_use() == (4, 1.0, 30, 3.0))
    gate.set()
    until(lambda: in_use() == (4, 0.0, 30, 0.0))


def test_threads_that_have_ended_in_a_drain_are_not_in_use(
    start: Start, gate: threading.Event
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    add(handler="h")
    running = start(threads=4)
    until(lambda: running.worker.running_messages)
    run = running.worker._run
    assert run is not None
    running.worker.ask_to_stop()
    until(lambda: sum(each.is_alive() for each in run.parts.executors) == 1)
    assert run.parts.local_queue.free.count == 3
