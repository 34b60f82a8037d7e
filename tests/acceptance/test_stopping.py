"""Operators stop a running message, and ask for its handler's stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from io import StringIO

import pytest
from django.core.management import call_command

from django_mq import RetryPolicy, fixed, queues
from django_mq.models import FailedAttempt
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker, is_running
from tests.slow import slow
from tests.test_docs import ROOT, snippets


@pytest.mark.parametrize("kind", ["gate", *slow("agate")])
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
    assert is_running(first) == (kind == "agate")

    witness.open("open")
    witness.open("gate2")
    queue.wait_empty(worker)
    queues.stop(endless)  # it has ended, so this has no effect
    assert queue.failures(beside) == []
    assert queue.failures(endless) == ["Stopped"]


def test_the_steps_of_the_docs_keep_a_stopped_message_from_running_again(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """A retry comes within a second, and would hang the next process."""
    [block] = [each for each in snippets(ROOT / "docs/operating.md", "sh") if "mq_stop" in each]
    steps = re.findall(r"manage\.py (.+?) *(?:#.*)?$", block, re.MULTILINE)
    worker = start("--threads", 1)
    [endless] = queue.send("gate", "endless", gate="never", retry=RetryPolicy(backoff=fixed(0)))
    worker.until(lambda: queues.ask_stack(endless).ids and witness.started(), "it runs")
    name = queue.message(endless).queue
    for step in steps:
        command = step.replace("QUEUE", name).replace("ID", str(endless))
        is_done = queue.empty if command.startswith("mq_purge") else lambda: True
        worker.until(partial(_run, command, is_done), command)
    [after] = queue.send("gate", "after", gate="open")
    witness.open("open")
    queue.wait_empty(worker)
    assert [name for name, _, _ in witness.started()] == ["endless", "after"]
    assert queue.failures(endless) == ["Stopped"]
    assert queue.failures(after) == []


def _run(command: str, is_done: Callable[[], bool]) -> bool:
    call_command(*command.split(), "--yes", stdout=StringIO())
    return is_done()


def pid_of(witness: Witness) -> int:
    return witness.started("endless")[0][2]
