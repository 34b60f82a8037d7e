"""Handlers that cancel tasks of the loop: their own, or all, as recipes for a clean exit do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.test import override_settings

from django_mq import handler
from django_mq.models import FailedAttempt
from django_mq.store import leases
from tests.rows import insert_all
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, Said, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


SHORT = override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.1, "LEASE": 1})


def cancel_all_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@SHORT
def test_a_message_that_waits_for_its_lease_is_not_held_for_ever(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease was renewed, but nothing ran it: only the end of the process freed it."""
    asked, cancelled = threading.Event(), threading.Event()
    give = leases.start

    def slow_start(*args: Any, **options: Any) -> dict[int, bool]:
        asked.set()
        assert cancelled.wait(PATIENCE)
        return give(*args, **options)

    monkeypatch.setattr(leases, "start", slow_start)

    @handler("#", queue="mail", name="cancels")
    async def cancels(delivery: Any) -> None:
        while not asked.is_set():
            await asyncio.sleep(0.01)
        cancel_all_others()
        cancelled.set()

    @handler("#", queue="mail", name="neighbour")
    async def neighbour(delivery: Any) -> None: ...

    insert_all([{"handler": "cancels"}, {"handler": "neighbour", "key": "a"}])
    running = start()
    until(lambda: not waiting())
    running.stop()


def test_one_whose_task_has_not_begun_runs_again_at_once_and_uncharged(
    start: Start, said: Said
) -> None:
    """It was left to the end of its lease, lost an attempt, and kept its slot for ever."""

    @handler("#", queue="mail", name="cancels")
    async def cancels(delivery: Any) -> None:
        cancel_all_others()

    @handler("#", queue="mail", name="neighbour")
    async def neighbour(delivery: Any) -> None: ...

    insert_all(
        {"handler": name, "after": at} for name, at in (("cancels", -60), ("neighbour", -50))
    )
    running = start()
    assert [each.attempt for each in said.wait("message_acked", 2)] == [1, 1]
    assert running.worker._run is not None
    until(lambda: running.worker._run.parts.local_queue.slots.room() == 100)
    running.stop()


@pytest.mark.parametrize("error", [None, ValueError()], ids=repr)
def test_a_handler_that_ends_with_a_cancel_of_its_own_has_failed(
    start: Start, said: Said, error: Exception | None
) -> None:
    """Nothing was recorded: it ran again after its lease, and again."""

    @handler("#", queue="mail", name="cancels")
    async def cancels(delivery: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if error is not None:
            raise error

    (id,) = insert_all([{"handler": "cancels", "max_attempts": 1}])
    running = start()
    said.wait("message_dead")
    failed = FailedAttempt.objects.get(message_id=id)
    assert failed.error_class.endswith("CancelledError")
    running.stop()


def test_cancel_does_not_keep_the_drain_from_ending(start: Start, gate: threading.Event) -> None:
    """The drain waits on the same loop."""

    @handler("#", queue="mail", name="cancels")
    async def cancels(delivery: Any) -> None:
        begun.set()
        while not gate.is_set():
            await asyncio.sleep(0.01)
        cancel_all_others()

    begun = threading.Event()
    insert_all([{"handler": "cancels"}])
    running = start(drain_seconds=20.0)
    assert begun.wait(PATIENCE)
    run = running.worker._run
    assert run is not None
    running.worker.ask_to_stop()
    until(lambda: len(asyncio.all_tasks(run.parts.runner._loop)) > 1, "the drain waits")
    gate.set()
    assert running.join()
    assert waiting() == set()
