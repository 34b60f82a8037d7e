"""The end of the handlers' loop: calls, tasks left behind and open generators clean up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from django_mq import handler
from django_mq.signals import worker_stopped
from tests.rows import add
from tests.worker.conftest import PATIENCE, Running, Said, add_many

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_garbage")]

Start = Callable[..., Running]

#: Seconds that a cleanup takes: much less than a drain of 4 s leaves for it.
CLEANUP = 0.1


@pytest.fixture
def cleaned() -> list[int]:
    """Filled by the handlers of a test."""
    return []


@pytest.fixture
def at_the_end(cleaned: list[int]) -> Any:
    """Return the cleanups that ran before the worker stopped: after that, its process is gone."""
    seen: list[int] = []

    def receiver(**data: Any) -> None:
        seen.extend(cleaned)

    worker_stopped.connect(receiver)
    yield seen
    worker_stopped.disconnect(receiver)


def on(**options: Any) -> Callable[[Any], Any]:
    return handler("#", queue="mail", name="h", **options)


def tasks_left(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [each for each in caplog.records if getattr(each, "event", "") == "tasks_left"]


def test_cancelled_handlers_have_time_to_clean_up(
    start: Start, said: Said, cleaned: list[int], at_the_end: list[int]
) -> None:
    @on(timeout=PATIENCE)
    async def h(delivery: Any) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await asyncio.sleep(CLEANUP)
            cleaned.append(delivery.id)

    messages = add_many(300, handler="h")
    running = start(drain_seconds=4, async_slots=300)
    said.wait("message_started", 300)
    assert running.stop() is False
    assert sorted(at_the_end) == [each.pk for each in messages]


@pytest.mark.slow
def test_a_handler_that_ignores_its_cancel_takes_no_time_from_tasks_left_behind(
    start: Start, said: Said, cleaned: list[int], at_the_end: list[int]
) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def clean(id: int) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await asyncio.sleep(CLEANUP)
            cleaned.append(id)

    @on(timeout=PATIENCE)
    async def h(delivery: Any) -> None:
        tasks.add(asyncio.create_task(clean(delivery.id)))
        while True:
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                continue

    message = add(handler="h")
    running = start(drain_seconds=6)
    said.wait("message_started")
    assert running.stop() is False
    assert at_the_end == [message.pk]


@pytest.mark.slow
def test_a_handler_that_cleans_up_for_long_is_still_waited_for(
    start: Start, said: Said, cleaned: list[int], at_the_end: list[int]
) -> None:
    """Its cleanup ends after the tasks left behind are cancelled."""
    tasks: set[asyncio.Task[None]] = set()

    async def tell(cancelled: asyncio.Event) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            cancelled.set()

    @on(timeout=PATIENCE)
    async def h(delivery: Any) -> None:
        tasks.add(asyncio.create_task(tell(cancelled := asyncio.Event())))
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await cancelled.wait()
            await asyncio.sleep(CLEANUP)
            cleaned.append(delivery.id)

    message = add(handler="h")
    running = start(drain_seconds=6)
    said.wait("message_started")
    assert running.stop() is False
    assert at_the_end == [message.pk]


def test_tasks_left_behind_are_cancelled_and_counted(
    start: Start, cleaned: list[int], at_the_end: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def push(id: int) -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await asyncio.sleep(CLEANUP)
            cleaned.append(id)

    @on()
    async def h(delivery: Any) -> None:
        tasks.add(asyncio.create_task(push(delivery.id)))
        await asyncio.sleep(0)  # it begins

    messages = add_many(3, handler="h")
    with caplog.at_level(logging.WARNING, "django_mq"):
        assert start(until_empty=True).join()
    assert sorted(at_the_end) == [each.pk for each in messages]
    [record] = tasks_left(caplog)
    assert record.tasks == 3
    assert "3 tasks that async handlers left running were cancelled" in record.getMessage()
    assert ".push)" in record.getMessage()


def test_a_task_that_ended_by_itself_is_not_counted(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    @on()
    async def h(delivery: Any) -> None:
        await asyncio.create_task(asyncio.sleep(0))

    add(handler="h")
    with caplog.at_level(logging.WARNING, "django_mq"):
        assert start(until_empty=True).join()
    assert not tasks_left(caplog)


def test_open_generators_are_closed_on_the_loop_of_the_handlers(
    start: Start, cleaned: list[int], at_the_end: list[int]
) -> None:
    """So that a client that one of them keeps open is closed where it was made."""
    loops: list[asyncio.AbstractEventLoop] = []
    kept: list[AsyncIterator[int]] = []

    async def client(id: int) -> AsyncIterator[int]:
        try:
            yield id
        finally:
            await asyncio.sleep(0)
            loops.append(asyncio.get_running_loop())
            cleaned.append(id)

    @on()
    async def h(delivery: Any) -> None:
        kept.append(opened := client(delivery.id))
        assert await anext(opened) == delivery.id
        loops.append(asyncio.get_running_loop())

    message = add(handler="h")
    assert start(until_empty=True).join()
    assert at_the_end == [message.pk]
    assert loops[0] is loops[1]
