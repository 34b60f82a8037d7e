"""Operators stop a running message, and ask for its handler's stack."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_mq import queues
from django_mq.models import FailedAttempt
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker, is_running


@pytest.mark.parametrize("kind", ["gate", "acall"])
def test_stop(start: Callable[..., Worker], queue: Queue, witness: Witness, kind: str) -> None:
    """Only the named message is charged; a coroutine is cancelled, and its process continues."""
    worker = start("--threads", 2)
    [beside] = queue.send(kind, "beside", gate="open")
    [endless] = queue.send(kind, "endless", gate="gate{attempt}")
    worker.until(lambda: len(witness.started()) == 2, "both run")
    worker.until(lambda: queues.ask_stack(endless, by="ana").ids, "it is known to run")
    worker.until(lambda: queues.commands(endless)[0].answered_at, "it says where it is")
    assert f", in {kind}\n" in queues.commands(endless)[0].answer
    assert [each.pid for each in queues.running(ids=[endless])] in ([], [pid_of(witness)])

    assert queues.stop([endless, beside + 10_000], by="ana").ids == (endless,)
    worker.until(lambda: len(witness.started("endless")) == 2, "it runs again")
    failed = FailedAttempt.objects.get()
    assert failed.message_id == endless
    assert failed.error_class.endswith(".Stopped")
    assert failed.error_text == "stopped by ana"
    assert f", in {kind}\n" in failed.traceback
    assert failed.started_at is not None
    assert failed.started_at < failed.ended_at
    (_, _, first), (_, _, _) = witness.started("endless")
    assert is_running(first) == (kind == "acall")

    witness.open("open")
    witness.open("gate2")
    queue.wait_empty(worker)
    queues.stop(endless)  # it has ended, so this has no effect
    assert queue.failures(beside) == []
    assert queue.failures(endless) == ["Stopped"]


def pid_of(witness: Witness) -> int:
    return witness.started("endless")[0][2]
