"""The operators' view of a queue that backs off."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage, QueueState
from tests.rows import add
from tests.waiting import until
from tests.worker.backing_off.conftest import LONG
from tests.worker.conftest import Bench, Said, Start, add_many, waiting
from tests.worker.service import Service, in_flight

pytestmark = pytest.mark.django_db(transaction=True)


def test_status_why_and_admin_show_it(
    start: Start, said: Said, service: Service, settings: Any
) -> None:
    """From a queue that backs off, through its probe, to a backoff that an operator ends."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"backoff": LONG}}}
    service.error = KeyError("host")
    service.handle()
    add_many(5, handler="h")
    worker = start(threads=1)
    said.wait("backoff_started")
    until(lambda: in_flight() == 0)
    last = QueuedMessage.objects.order_by("processable_after")[2]
    [mail] = (each for each in told("mq_status")["queues"] if each["queue"] == "mail")
    assert mail["backoff_level"] == 1
    assert mail["backoff_until"]
    assert "backing off" in told("mq_why", last.pk)["text"]
    page = admin_of_queues()
    assert "level 1" in page
    service.gate.clear()
    QueueState.objects.filter(queue="mail").update(backoff_until=None)
    until(lambda: service.running)
    assert (
        f"worker {worker.worker.id} runs one message as a probe" in told("mq_why", last.pk)["text"]
    )
    service.error = None
    service.gate.set()
    said.wait("backoff_ended")
    until(lambda: len(waiting()) <= 1)  # the failed one is due later
    assert worker.stop()
    assert "level 1" not in admin_of_queues()


def told(*command: Any) -> Any:
    out = StringIO()
    call_command(*map(str, command), "--json", stdout=out)
    return json.loads(out.getvalue())


def admin_of_queues() -> str:
    boss, client = get_user_model().objects.create_superuser("boss"), Client()
    try:
        client.force_login(boss)
        return client.get("/admin/django_mq/queuestate/").content.decode()
    finally:
        client.logout()
        boss.delete()


def test_a_batch_of_a_stopped_queue_does_not_start(bench: Bench) -> None:
    """Another thread's message failed after the batch left the local queue."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        ran.extend(delivery.id for delivery in deliveries)

    for _ in range(3):
        add(handler="h")
    tasks = bench.claim()
    bench.stopped_queues["mail"] = None
    assert bench.run(tasks).left == tasks
    assert ran == []
