"""Calls in other threads that outlast their handlers: the supervisor sees them, and where they are.

Guarantee 23: a thread cannot be cancelled, so only the end of its process ends such a call.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_mq import handler
from django_mq.executor.scoreboard import Entry
from django_mq.policy.stack import all_stacks, running_in
from tests.executor.other_threads import LATER, Way, send, ways
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, Said, attempts_of

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


def entries(running: Running) -> list[Entry]:
    run = running.worker._run
    return list(run.parts.scoreboard.read(running.worker.id)) if run else []


def functions(entry: Entry) -> list[str]:
    """Return the functions that the attempt shows if the supervisor ends the process now."""
    return [function for _, _, function in running_in(all_stacks(), entry.thread)]


async def hang(way: Way, function: Callable[[], object], delivery: Any) -> None:
    """Call `function`, and let the handler time out once the call has begun."""
    begun = threading.Event()

    def begin() -> None:
        begun.set()
        function()

    call = asyncio.ensure_future(way(begin))
    await asyncio.to_thread(begun.wait, PATIENCE)
    delivery.extend(0.01)
    await call


@ways
def test_the_message_stays_on_the_scoreboard(
    start: Start, said: Said, gate: threading.Event, way: Way
) -> None:
    """A neighbour that waits in a thread too, but has time left, is not taken for it."""
    cancelled, end = threading.Event(), threading.Event()

    def neighbour_waits() -> None:
        assert gate.wait(PATIENCE)

    def culprit_hangs() -> None:
        assert end.wait(PATIENCE)

    @handler("#", queue="mail", name="neighbour", timeout=PATIENCE * 4, retry=LATER)
    async def neighbour(delivery: Any) -> None:
        await way(neighbour_waits)

    @handler("#", queue="mail", name="culprit", timeout=PATIENCE * 4, retry=LATER)
    async def culprit(delivery: Any) -> None:
        try:
            await hang(way, culprit_hangs, delivery)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    @handler("#", queue="mail", name="quick", retry=LATER)
    async def quick(delivery: Any) -> None:
        [own] = [each for each in entries(running) if each.fence.id == delivery.id]
        assert own.thread == threading.get_ident()

    beside, hung = send("neighbour"), send("culprit")
    running = start(queues=["mail"])
    assert cancelled.wait(PATIENCE)
    send("quick")
    said.wait("message_acked")
    shown = {each.fence.id: each for each in entries(running)}
    assert sorted(shown) == [beside.pk, hung.pk]
    assert "culprit_hangs" in functions(shown[hung.pk])
    assert "culprit_hangs" not in functions(shown[beside.pk])
    end.set()
    said.wait("message_retried")
    assert attempts_of(hung) == ["django_mq.policy.outcomes.TimedOut"]
    send("quick")  # it gets the place of the culprit on the scoreboard
    until(lambda: said.count("message_acked") == 2 or said.count("message_retried") == 2)
    assert said.count("message_acked") == 2
    gate.set()
    said.wait("message_acked", 3)
    assert running.stop()


def test_calls_that_the_handler_does_not_await(
    start: Start, said: Said, gate: threading.Event
) -> None:
    begun = threading.Semaphore(0)

    def left_alone() -> None:
        begun.release()
        assert gate.wait(PATIENCE)

    def both_begun() -> None:
        assert begun.acquire(timeout=PATIENCE)
        assert begun.acquire(timeout=PATIENCE)

    @handler("#", queue="mail", name="h", timeout=PATIENCE * 4, retry=LATER)
    async def h(delivery: Any) -> None:
        loop = asyncio.get_running_loop()
        calls.extend(loop.run_in_executor(None, left_alone) for _ in range(2))
        await asyncio.to_thread(both_begun)
        delivery.extend(0.01)
        await asyncio.sleep(PATIENCE)

    calls: list[Any] = []
    hung = send("h")
    running = start(queues=["mail"])
    until(lambda: any("left_alone" in functions(each) for each in entries(running)), "it waits")
    gate.set()
    said.wait("message_retried")
    assert attempts_of(hung) == ["django_mq.policy.outcomes.TimedOut"]
    assert running.stop()


def test_name_lookups_of_the_loop_end_by_themselves(
    start: Start, said: Said, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If name servers are down, each handler with a client waits for one: no process must end."""

    def never_found(*args: Any, **options: Any) -> Any:
        assert gate.wait(PATIENCE)
        raise socket.gaierror

    @handler("#", queue="mail", name="h", timeout=0.05, retry=LATER)
    async def h(delivery: Any) -> None:
        await asyncio.get_running_loop().getaddrinfo("mail.example", 25)

    send("h")
    monkeypatch.setattr(socket, "getaddrinfo", never_found)
    running = start(queues=["mail"])
    said.wait("message_retried")
    assert not gate.is_set()
    gate.set()
    assert running.stop()
