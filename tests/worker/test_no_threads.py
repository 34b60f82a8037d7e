"""The system refuses a thread or a descriptor for a moment: no message is held for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.test import override_settings

from django_mq import handler
from django_mq.executor.async_runner import AsyncRunner
from django_mq.models import QueuedMessage
from django_mq.worker import DeadWorker
from tests.rows import add, insert_all
from tests.waiting import SOON, until
from tests.worker.conftest import Running, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


def refuse_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """Let the next call of a method raise the error of a system without threads."""
    real, refused = getattr(owner, name), threading.Event()

    def refusing(self: Any) -> None:
        if not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(owner, name, refusing)
    return refused


@override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.1})
def test_coroutines_that_could_not_start_are_released(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases were renewed until the process ended, but nothing ran them."""
    refused = refuse_once(monkeypatch, AsyncRunner, "start")

    @handler("#", queue="mail", name="plain")
    def plain(delivery: Any) -> None: ...

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None: ...

    insert_all([{"handler": "plain"}])
    running = start()
    until(lambda: not waiting())
    insert_all({"handler": "h", "key": key} for key in (None, "a"))
    until(lambda: not waiting())
    assert refused.is_set()
    running.stop()


def test_a_recovery_that_could_not_start_does_so_with_the_next(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further dead sibling was settled, and the worker never counted as idle again."""
    real = threading.Thread.start

    def refusing(self: threading.Thread) -> None:
        if self.name == "mq-recovery" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        real(self)

    refused, settled = threading.Event(), [threading.Event(), threading.Event()]
    for n in range(2):
        add(handler="h", claimed_by=f"dead{n}:1", leased=3600, attempts=1)
    running = start()
    until(lambda: running.worker._run is not None and running.worker._run.parts.liveness.is_ready)
    monkeypatch.setattr(threading.Thread, "start", refusing)
    with pytest.raises(RuntimeError):
        running.worker.recover(DeadWorker("dead0", "was killed"), settled[0].set)
    running.worker.recover(DeadWorker("dead1", "was killed"), settled[1].set)
    assert all(each.wait(SOON) for each in settled)
    running.stop()
    assert not QueuedMessage.objects.filter(claimed_by__startswith="dead").exists()
