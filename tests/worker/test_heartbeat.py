"""A worker reports in its heartbeats how many of its threads and slots are in use."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from django_mq import handler
from django_mq.executor.watchdog import ConnectionStalled
from django_mq.messages import Delivery
from django_mq.models import WorkerHeartbeat
from django_mq.store import leases
from django_mq.worker import lease_keeper
from django_mq.worker.lease_keeper import LeaseKeeper
from tests.database import second_connection
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


@pytest.mark.slow
def test_commits_hang_until_a_heartbeat_is_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The COMMIT of an earlier one still waits for a standby, so the row is locked."""
    real = leases.record_heartbeat
    running = start()
    until(lambda: WorkerHeartbeat.objects.exists())
    keeper = running.worker._run.parts.lease_keeper  # type: ignore[union-attr]
    assert not keeper.commits_hang
    lost: list[float] = []

    def lose_once(cursor: Any, **options: Any) -> leases.HeartbeatReply:
        if lost:
            return real(cursor, **options)
        lost.append(1.0)
        raise ConnectionStalled("connection stalled: the server did not answer")

    monkeypatch.setattr(leases, "record_heartbeat", lose_once)
    with second_connection() as other, other.transaction(force_rollback=True):
        other.execute("select from django_mq_workerheartbeat for update")
        renewals: list[float] = []
        monkeypatch.setattr(keeper, "_probes", lambda: renewals.append(1.0) or [])
        keeper.request_heartbeat()
        until(lambda: lost and len(renewals) > 2)
        assert keeper.commits_hang
        beats = keeper.beats
        until(lambda: "the COMMIT of an earlier heartbeat still waits" in caplog.text)
        assert keeper.beats == beats
    until(lambda: not keeper.commits_hang)
    assert keeper.beats > beats
    assert running.stop()


def test_a_stall_of_the_figures_asks_for_a_heartbeat(
    start: Start, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one is stored, commits count as hanging, and the worker claims nothing."""
    settings.DJANGO_MQ = {"LEASE": 3600}
    monkeypatch.setattr(lease_keeper, "HEARTBEAT_SECONDS", 1200.0)
    real = LeaseKeeper._write_figures
    stalled: list[LeaseKeeper] = []

    def stall_once(keeper: LeaseKeeper) -> None:
        if stalled:
            return real(keeper)
        stalled.append(keeper)
        raise ConnectionStalled("connection stalled: the server did not answer")

    monkeypatch.setattr(LeaseKeeper, "_write_figures", stall_once)
    running = start()
    until(lambda: stalled and stalled[0].beats > 1, "a second heartbeat")
    until(lambda: not stalled[0].commits_hang)
    assert running.stop()


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
