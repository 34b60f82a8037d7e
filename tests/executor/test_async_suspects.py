"""A suspect of an async handler runs on the loop of the coroutines, while nothing else runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_mq import RetryPolicy, fixed, handler
from django_mq.models import FailedAttempt
from tests.rows import add, stored
from tests.slow import slow
from tests.worker.conftest import PATIENCE, Running, Said, attempts_of, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


def on(**options: Any) -> Callable[[Any], Any]:
    return handler("#", queue="mail", name="h", **options)


def test_a_client_that_a_suspect_used_works_for_the_next_message(start: Start) -> None:
    """HTTP clients and pools belong to the loop on which they first connected."""
    client: asyncio.Future[None] | None = None
    threads = set()

    @on(retry=RetryPolicy.never())
    async def h(delivery: Any) -> None:
        nonlocal client
        loop = asyncio.get_running_loop()
        threads.add(threading.current_thread().name)
        client = client or loop.create_future()
        assert client.get_loop() is loop
        await delivery.afinish(effect, delivery)

    suspect = add(handler="h", suspect=True, after=-90)
    messages = [suspect, *(add(handler="h", after=-60) for _ in range(3))]
    assert start(until_empty=True).join()
    assert threads == {"mq-async"}
    assert effects() == {m.pk for m in messages}
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("options", [{}, {"batch": True}], ids=["single", "list"])
def test_a_suspect_is_cancelled_at_its_timeout(
    start: Start, said: Said, options: dict[str, Any]
) -> None:
    """As any other coroutine: its `finally` runs, and its process goes on."""
    cleaned_up: list[str] = []

    @on(timeout=0.05, retry=RetryPolicy(backoff=fixed(600)), **options)
    async def h(delivery: Any) -> None:
        try:
            await asyncio.sleep(2 * PATIENCE)
        finally:
            cleaned_up.append(threading.current_thread().name)

    suspect = add(handler="h", suspect=True)
    assert start(until_empty=True).join()
    assert cleaned_up == ["mq-async"]
    assert attempts_of(suspect) == ["django_mq.policy.outcomes.TimedOut"]
    assert (stored(suspect).attempts, stored(suspect).suspect) == (1, False)
    assert said.ids("message_retried") == [suspect.pk]


@pytest.mark.parametrize("threads", [2, *slow(1)])
def test_suspects_of_both_kinds_take_turns_with_the_others(start: Start, threads: int) -> None:
    """The loop and the executors each start what is theirs, whichever ended last."""
    running: list[str] = []
    beside: list[str] = []

    @contextlib.contextmanager
    def noted(delivery: Any) -> Any:
        running.append(delivery.payload)
        yield
        if "suspect" in {delivery.payload, *running} and len(running) > 1:
            beside.extend(running)
        running.remove(delivery.payload)

    @handler("#", queue="mail", name="sync")
    def h(delivery: Any) -> None:
        with noted(delivery):
            effect(delivery)

    @handler("#", queue="mail", name="async")
    async def ah(delivery: Any) -> None:
        with noted(delivery):
            await asyncio.sleep(0)
            await delivery.afinish(effect, delivery)

    messages = []
    for n in range(48):
        suspect = n % 4 > 1
        messages.append(
            add(
                handler="async" if n % 2 else "sync",
                payload="suspect" if suspect else "plain",
                suspect=suspect,
                key=f"k{n % 3}" if n % 5 == 0 else None,
            ).pk
        )
    assert start(until_empty=True, threads=threads, async_slots=3).join()
    assert effects() == set(messages)
    assert waiting() == set()
    assert beside == []


def test_a_drain_out_of_time_cancels_a_suspect(start: Start, said: Said) -> None:
    cancelled = threading.Event()

    @on()
    async def h(delivery: Any) -> None:
        try:
            await asyncio.sleep(2 * PATIENCE)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    suspect = add(handler="h", suspect=True)
    running = start(drain_seconds=0.05)
    said.wait("message_started")
    assert running.stop() is False
    assert cancelled.wait(PATIENCE)
    assert suspect.pk in waiting()
