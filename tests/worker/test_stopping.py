"""The answers of a worker without a supervisor to requests to stop its messages."""

from __future__ import annotations

import threading

import pytest

from django_mq import Delivery, fixed, handler, queues
from django_mq.models import WorkerCommand
from django_mq.policy.backoff import RetryPolicy
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import Said, Start

pytestmark = pytest.mark.django_db(transaction=True)


def answer(action: str) -> str:
    found = WorkerCommand.objects.filter(action=action, answered_at__isnull=False).first()
    return found.answer if found else ""


def test_stop_without_a_supervisor_only_reports_the_stack(start: Start, said: Said) -> None:
    gate = threading.Event()

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(0)))
    def held(delivery: Delivery) -> None:
        gate.wait(60)

    message = add(handler="h")
    running = start()
    said.wait("message_started")
    until(lambda: queues.ask_stack(message.pk).ids)
    queues.stop(message.pk, by="ana")
    until(lambda: answer("stop"))
    assert "Worker.run() has no supervisor" in answer("stop")
    until(lambda: answer("stack"))
    assert ", in held\n" in answer("stack")
    gate.set()
    said.wait("message_acked")
    running.stop()
