"""The reports of a running worker: log lines, signals, heartbeats."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import WorkerHeartbeat
from django_mq.signals import message_acked
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Said, Start, add_many

pytestmark = pytest.mark.django_db(transaction=True)


def test_log_lines_have_events_and_no_payload(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """PMQ-65: message, cause, delay; S-numbers of security: no payload."""
    caplog.set_level(logging.DEBUG, "django_mq")

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=2, backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        if delivery.type == "bad":
            raise ValueError("no")

    add(handler="h", type="good", payload={"password": "sesame"})
    bad = add(handler="h", type="bad", payload={"password": "sesame"}, max_attempts=2)
    running = start()
    said.wait("message_dead")
    said.wait("message_acked")
    running.stop()
    events = [r.event for r in caplog.records if hasattr(r, "event")]
    assert events.count("message_retried") == 1
    assert events.count("message_dead") == 1
    assert events.count("worker_started") == events.count("worker_stopped") == 1
    assert "sesame" not in str([record.__dict__ for record in caplog.records])
    (retried,) = (r for r in caplog.records if getattr(r, "event", "") == "message_retried")
    assert str(bad.pk) in retried.getMessage()
    assert "failed (ValueError); again at once" in retried.getMessage()


def test_receivers_that_raise_change_nothing(start: Start, said: Said) -> None:
    """KAF-4: a receiver cannot bring the worker down."""

    def rude(sender: str, **data: Any) -> None:
        raise RuntimeError

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    message_acked.connect(rude)
    try:
        messages = add_many(3, handler="h")
        start(until_empty=True).join()
    finally:
        message_acked.disconnect(rude)
    assert said.ids("message_acked") == [m.pk for m in messages]


def test_the_heart_beats_while_it_runs(start: Start, said: Said, gate: threading.Event) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert gate.wait(PATIENCE)

    add(handler="h")
    running = start(queues=["mail"])
    said.wait("message_started")
    until(lambda: WorkerHeartbeat.objects.filter(id=running.worker.id).exists())
    beat = WorkerHeartbeat.objects.get()
    assert beat.queues == ["mail"]
    assert beat.draining is False
    gate.set()
    running.stop()
    assert not WorkerHeartbeat.objects.exists()
