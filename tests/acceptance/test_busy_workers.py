"""The output of commands while all threads of a worker are in long handlers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db.models.functions import Now

from django_mq import queues
from django_mq.models import QueuedMessage
from django_mq.queues import busy
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker


def test_a_due_message_waits_for_a_free_thread(
    start: Callable[..., Worker],
    queue: Queue,
    witness: Witness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(busy, "BUSY_AFTER", timedelta(0))  # no test waits for five seconds
    worker = start("--threads", 2)
    ids = queue.send("gate", "one", "two", gate="end")
    worker.until(lambda: len(witness.started()) == 2, "both run")
    [third] = queue.send("gate", "three", gate="end")

    def is_explained() -> bool:
        waiting = QueuedMessage.objects.filter(pk=third, leased_until__isnull=True)
        waiting.update(processable_after=Now() - timedelta(minutes=1))
        queues.ask_stack(ids)  # with it the worker writes a heartbeat
        text = str(queues.why(third))
        return "; the workers that serve its queue are busy: " in text and all(
            f" has run message {id} (" in text for id in ids
        )

    worker.until(is_explained, "mq_why names both messages")
    out = StringIO()
    call_command("mq_workers", stdout=out)
    _, messages = out.getvalue().split("\n\n")
    assert {line.split()[1] for line in messages.splitlines()[1:]} == set(map(str, ids))
    assert f"mq_stop {ids[0]} ends the attempt now" in str(queues.why(ids[0]))
    witness.open("end")
    queue.wait_empty(worker)
