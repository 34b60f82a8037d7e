"""A worker that an operator made quiet: the work it gives away, and the work it keeps."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from django.test import override_settings

from django_mq import Delivery, handler, queues
from django_mq.models import QueuedMessage, QueueState, WorkerHeartbeat
from django_mq.store import leases
from django_mq.worker import lease_keeper
from tests.rows import add, insert_all
from tests.waiting import until
from tests.worker.conftest import Running, Said, Start
from tests.worker.service import Service, in_flight

pytestmark = pytest.mark.django_db(transaction=True)


def told(running: Running, order: str) -> None:
    """Give an order like an operator, and wait until the heartbeat reports it as obeyed."""
    tell = {"quiet": queues.quiet_workers, "resume": queues.resume_workers}[order]
    until(lambda: running.worker.id and tell(running.worker.id))
    row = WorkerHeartbeat.objects.filter(pk=running.worker.id, quiet=order == "quiet")
    until(row.exists)


def test_no_handler_starts_that_had_not_started(start: Start) -> None:
    """Even messages that an executor had taken from the local queue do not start."""
    service = Service()
    service.gate.clear()
    service.handle()
    insert_all({"handler": "h"} for _ in range(20))
    running = start(threads=2)
    until(lambda: service.running == 2)
    told(running, "quiet")
    until(lambda: in_flight() == 2)
    service.gate.set()
    until(lambda: not in_flight())
    assert len(service.calls) == 2
    assert set(QueuedMessage.objects.values_list("attempts", flat=True)) == {0}
    told(running, "resume")
    until(lambda: not QueuedMessage.objects.exists())
    assert sorted(service.ids) == sorted(set(service.ids))
    running.stop()


def test_coroutines_too(start: Start) -> None:
    service = Service()
    service.gate.clear()
    service.ahandle()
    insert_all({"handler": "h", "key": "k"} for _ in range(3))
    running = start()
    until(lambda: service.running == 1)
    told(running, "quiet")
    until(lambda: in_flight() == 1)
    service.gate.set()
    until(lambda: not in_flight())
    assert len(service.calls) == 1
    running.stop()


def test_another_worker_gets_its_ordered_queue(start: Start, settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
    service = Service()
    service.handle()
    add(handler="h", ordered=True)
    quiet = start()
    until(lambda: len(service.calls) == 1)
    owner = QueueState.objects.get(pk="mail")
    assert (owner.owner or "").startswith(quiet.worker.id)
    told(quiet, "quiet")
    other = start()
    add(handler="h", ordered=True)
    until(lambda: len(service.calls) == 2)
    owner.refresh_from_db()
    assert (owner.owner or "").startswith(other.worker.id)
    quiet.stop(), other.stop()


def test_running_message_keeps_its_ordered_queue(start: Start, settings: Any, said: Said) -> None:
    """Its lease is six seconds: a message that runs for longer keeps the queue."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
    gate = threading.Event()

    @handler("#", queue="mail", name="h")
    def held(delivery: Delivery) -> None:
        assert gate.wait(60)

    add(handler="h", ordered=True)
    quiet = start()
    said.wait("message_started")
    told(quiet, "quiet")
    first = QueueState.objects.get(pk="mail").owned_until
    state = QueueState.objects.filter(pk="mail", owned_until__gt=first)
    until(state.exists)
    assert "queue_unassigned" not in [name for name, _, _ in said.all]
    gate.set()
    said.wait("queue_unassigned")
    quiet.stop()


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.05})
def test_schedules_and_operations_continue(start: Start) -> None:
    running = start()
    told(running, "quiet")
    message = add(dead=-1)
    made = queues.operate("discard", everything=True)
    until(lambda: not QueuedMessage.objects.filter(pk=message.pk).exists())
    until(lambda: queues.operations()[0].state == "done")
    assert queues.operations()[0].pk == made.pk
    running.stop()


def test_a_run_begins_without_the_orders_of_the_last(start: Start) -> None:
    service = Service()
    service.handle()
    running = start()
    told(running, "quiet")
    assert running.stop()
    again = Running(running.worker, until_empty=True)
    add(handler="h")
    assert again.join()
    until(lambda: not WorkerHeartbeat.objects.exists())


def test_an_order_to_stop_ends_the_run(start: Start) -> None:
    running = start()
    until(lambda: running.worker.id and queues.stop_workers(running.worker.id, by="ana"))
    assert running.join()
    assert not WorkerHeartbeat.objects.exists()


def test_only_live_workers_get_orders() -> None:
    WorkerHeartbeat.objects.create(
        id="gone", queues=[], running=[], host="h", pid=1, version="1", wakeup="notify",
        last_seen="2020-01-01T00:00Z",
    )  # fmt: skip
    assert queues.quiet_workers(["gone", "unknown"]) == ()
    assert queues.worker_orders("gone") == []
    with pytest.raises(ValueError, match="is not a name"):
        queues.stop_workers("a\0b")


def test_an_order_is_obeyed_although_the_answer_to_its_heartbeat_was_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat that took it was committed."""
    lost: list[int] = []
    real = leases.record_heartbeat

    def lose_once(cursor: Any, **options: Any) -> leases.HeartbeatReply:
        reply = real(cursor, **options)
        if reply.commands and not lost:
            lost.extend(each.id for each in reply.commands)
            cursor.execute("commit")
            raise psycopg.OperationalError("the connection was cut")
        return reply

    monkeypatch.setattr(leases, "record_heartbeat", lose_once)
    monkeypatch.setattr(lease_keeper, "HEARTBEAT_SECONDS", 1.0)
    running = start()
    until(lambda: running.worker.id and queues.quiet_workers(running.worker.id))
    until(lambda: lost)
    until(WorkerHeartbeat.objects.filter(pk=running.worker.id, quiet=True).exists)
    told(running, "resume")
    assert [each.action for each in queues.worker_orders(running.worker.id)] == ["resume", "quiet"]
    running.stop()
