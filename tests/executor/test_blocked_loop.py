"""A handler that blocks the event loop keeps no message from other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_mq import handler
from django_mq.executor import loop_watch
from django_mq.models import QueuedMessage
from django_mq.worker.dispatch import Dispatch
from django_mq.worker.parts import Parts
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, add_many, waiting
from tests.worker.service import FAR

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_garbage")]

Start = Callable[..., Running]
#: Seconds; never for a test.
NEVER = 3600.0


@pytest.fixture(autouse=True)
def soon_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", 0.2)


@pytest.fixture
def polls(settings: Any) -> Callable[[float], None]:
    def polls(interval: float) -> None:
        settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "POLL_INTERVAL": interval}

    return polls


class Blocking:
    """An async handler that blocks the loop at the gate for the payload "blocks"."""

    def __init__(self, gate: threading.Event) -> None:
        self.blocks = threading.Event()
        self.began: list[int] = []
        self._gate = gate

    async def __call__(self, delivery: Any) -> None:
        if delivery.payload == "blocks":
            self.blocks.set()
            assert self._gate.wait(PATIENCE)
        else:
            self.began.append(delivery.id)


@pytest.fixture
def blocking(gate: threading.Event) -> Blocking:
    blocking = Blocking(gate)

    async def h(delivery: Any) -> None:
        await blocking(delivery)

    handler("#", queue="mail", name="h")(h)
    return blocking


def add_blocking(**given: Any) -> int:
    return add(**{"handler": "h", "payload": "blocks", "after": -100, **given}).pk


def claimed() -> set[int]:
    claims = QueuedMessage.objects.filter(claimed_by__isnull=False)
    return set(claims.values_list("id", flat=True))


def unstarted() -> set[int]:
    """The messages in the queue without an attempt."""
    return set(QueuedMessage.objects.filter(attempts=0).values_list("id", flat=True))


def parts_of(running: Running) -> Parts:
    until(lambda: running.worker._run)
    assert running.worker._run is not None
    return running.worker._run.parts


def free_slots(running: Running) -> int:
    slots = parts_of(running).local_queue.slots
    while slots.widen():
        pass
    return slots.room()


def several_rounds(parts: Parts) -> None:
    rounds = parts.rounds
    until(lambda: parts.rounds > rounds + 5)


def test_calls_that_have_not_begun_go_back(
    start: Start,
    blocking: Blocking,
    gate: threading.Event,
    settings: Any,
) -> None:
    """The loop had created them all; no poll is needed, neither for that nor to go on."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), **FAR}
    first = add_blocking()
    others = [message.pk for message in add_many(5, handler="h")]
    blocked = start(async_slots=10)
    until(blocking.blocks.is_set)
    until(lambda: claimed() == {first})
    assert unstarted() == set(others)
    start(async_slots=10)
    until(lambda: waiting() == {first})
    assert blocking.began == others
    gate.set()
    until(lambda: not waiting())
    assert blocking.began == others
    until(lambda: free_slots(blocked) == 10)


def test_claims_continue_once_the_loop_moves(
    start: Start, blocking: Blocking, gate: threading.Event, settings: Any
) -> None:
    """Without another worker, and without a poll."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), **FAR}
    first = add_blocking()
    others = [message.pk for message in add_many(5, handler="h")]
    running = start(async_slots=10)
    until(lambda: claimed() == {first})
    gate.set()
    until(lambda: not waiting())
    assert blocking.began == others
    until(lambda: free_slots(running) == 10)


def test_messages_that_wait_for_the_loop_go_back(
    start: Start,
    blocking: Blocking,
    gate: threading.Event,
    polls: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were handed over while it was blocked already, but not for long."""
    polls(0.05)
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", NEVER)
    first = add_blocking()
    start(async_slots=3)
    until(blocking.blocks.is_set)
    others = {message.pk for message in add_many(2, handler="h")}
    until(lambda: claimed() == {first, *others})
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", 0.2)
    until(lambda: claimed() == {first})
    assert unstarted() == others
    gate.set()
    until(lambda: not waiting())
    assert set(blocking.began) == others


def test_nothing_more_is_claimed_for_a_blocked_loop(
    start: Start, blocking: Blocking, gate: threading.Event, polls: Callable[[float], None]
) -> None:
    """Plain functions go on."""
    polls(0.05)
    ran: list[int] = []

    @handler("#", queue="plain", name="plain")
    def plain(delivery: Any) -> None:
        ran.append(delivery.id)

    first = add_blocking()
    parts = parts_of(start(async_slots=10))
    until(blocking.blocks.is_set)
    until(parts.runner.blocked)
    others = {message.pk for message in add_many(5, handler="h")}
    done = add("plain", handler="plain").pk
    until(lambda: done not in waiting())
    several_rounds(parts)
    assert (claimed(), unstarted()) == ({first}, others)
    assert ran == [done]
    gate.set()
    until(lambda: not waiting())


def test_calls_that_wait_for_their_leases_go_back(
    start: Start, blocking: Blocking, gate: threading.Event, polls: Callable[[float], None]
) -> None:
    """Messages of a key: they asked for leases before the loop was blocked. Their order stays."""
    polls(0.05)
    keyed = [message.pk for message in add_many(3, handler="h", key="a", after=-200)]
    first = add_blocking()
    start(async_slots=10)
    until(blocking.blocks.is_set)
    until(lambda: claimed() == {first})
    assert unstarted() == set(keyed)
    start(async_slots=10)
    until(lambda: waiting() == {first})
    gate.set()
    until(lambda: not waiting())
    assert blocking.began == keyed


def test_an_ordered_queue_goes_to_a_sibling(
    start: Start, gate: threading.Event, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner cannot begin the first message, and disowns it."""
    settings.DJANGO_MQ = {
        **getattr(settings, "DJANGO_MQ", {}),
        "POLL_INTERVAL": 0.05,
        "QUEUES": {"line": {"ordered": True}},
    }
    blocking = Blocking(gate)

    @handler("#", queue="mail", queues=("line",), name="h")
    async def h(delivery: Any) -> None:
        await blocking(delivery)

    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", NEVER)
    first = add_blocking()
    start(async_slots=10)
    until(blocking.blocks.is_set)
    line = [message.pk for message in add_many(3, queue="line", handler="h")]
    until(lambda: line[0] in claimed())
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", 0.2)
    start(async_slots=10)
    until(lambda: waiting() == {first})
    assert blocking.began == line
    gate.set()
    until(lambda: not waiting())


def test_lists_that_linger_go_back(
    start: Start, blocking: Blocking, gate: threading.Event, polls: Callable[[float], None]
) -> None:
    polls(0.05)

    @handler("#", queue="mail", name="lists", batch=True, linger=60)
    async def lists(deliveries: Any) -> None:
        blocking.began.extend(each.id for each in deliveries)

    others = {message.pk for message in add_many(3, handler="lists", after=-200)}
    first = add_blocking()
    running = start(async_slots=10)
    until(blocking.blocks.is_set)
    until(lambda: claimed() == {first})
    assert unstarted() == others
    gate.set()
    until(lambda: waiting() == others)
    running.worker.ask_to_stop()
    assert running.stop()


def test_drain_releases_tasks_behind_a_blocked_loop(
    start: Start, blocking: Blocking, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", NEVER)
    first = add_blocking()
    others = {message.pk for message in add_many(5, handler="h")}
    running = start(async_slots=10, drain_seconds=PATIENCE)
    until(blocking.blocks.is_set)
    assert claimed() == {first, *others}
    running.worker.ask_to_stop()
    monkeypatch.setattr(loop_watch, "BLOCKED_AFTER", 0.2)
    until(lambda: claimed() == {first})
    assert unstarted() == others
    gate.set()
    assert running.stop()
    assert waiting() == others


def test_handlers_that_all_block_release_few(
    start: Start, polls: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first, the process claims about one at a time, not one for each slot."""
    polls(0.05)
    gates, began, claims = threading.Semaphore(0), list[int](), list[int]()
    take = Dispatch.take

    def counting(self: Dispatch, cursor: Any, rows: Any, **options: Any) -> None:
        claims.append(len(rows))
        take(self, cursor, rows, **options)

    monkeypatch.setattr(Dispatch, "take", counting)

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        began.append(delivery.id)
        assert gates.acquire(timeout=PATIENCE)

    add_many(20, handler="h")
    parts = parts_of(start(async_slots=20))
    for number in range(1, 5):
        until(lambda number=number: len(began) == number)  # type: ignore[misc]
        until(parts.runner.blocked)
        until(lambda: len(claimed()) == 1)
        several_rounds(parts)
        gates.release()
    gates.release(20)
    first, *others = claims[:4]
    assert first == 20
    assert max(others) <= 2
    until(lambda: not waiting())


def test_blocking_handler_is_logged_once(
    start: Start,
    blocking: Blocking,
    gate: threading.Event,
    polls: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    polls(0.05)
    monkeypatch.setattr(loop_watch, "REPORT_AFTER", 0.1)

    def reported() -> list[logging.LogRecord]:
        return [each for each in caplog.records if getattr(each, "event", "") == "loop_blocked"]

    first = add_blocking()
    parts = parts_of(start())
    until(reported)
    several_rounds(parts)
    [record] = reported()
    assert (record.levelno, record.message_id, record.queue) == (logging.WARNING, first, "mail")  # type: ignore[attr-defined]
    text = record.getMessage()
    assert f"message {first} (queue mail, handler h)" in text
    assert Path(__file__).name in text
    assert " in h," in text
    gate.set()
    until(lambda: not waiting())


def test_list_started_by_a_drain_behind_a_blocked_loop_is_released(
    start: Start, gate: threading.Event
) -> None:
    """The drain starts lists that linger; the first blocks the loop, and the second waits."""
    began = threading.Event()

    @handler("#", queue="mail", name="first", batch=True, linger=60)
    async def first(deliveries: list[Any]) -> None:
        began.set()
        gate.wait()

    @handler("#", queue="mail", name="second", batch=True, linger=60)
    async def second(deliveries: list[Any]) -> None: ...

    one = add(handler="first", after=-100).pk
    two = add(handler="second", after=-50).pk
    running = start(async_slots=10, drain_seconds=600)
    until(lambda: claimed() == {one, two})
    until(lambda: len(parts_of(running).runner._starts._lingering) == 2)
    running.worker.ask_to_stop()
    assert began.wait(60)
    until(lambda: claimed() == {one}, "the second list is given back")
    assert QueuedMessage.objects.get(pk=two).attempts == 0
    gate.set()
    assert running.join()


def test_a_loop_that_a_drain_has_closed_is_not_asked(start: Start, gate: threading.Event) -> None:
    """A call that ignores its cancel is still known then."""
    began = threading.Event()

    @handler("#", queue="mail", name="stubborn")
    async def stubborn(delivery: Any) -> None:
        began.set()
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    add(handler="stubborn")
    running = start(drain_seconds=0.1)
    assert began.wait(60)
    parts = parts_of(running)
    running.worker.ask_to_stop()
    until(lambda: parts.runner._loop.is_closed() and not parts.runner.is_alive())
    assert parts.runner._running
    assert parts.runner.watch() == float("inf")
