"""Blocking calls of async handlers share one thread: which handlers wait, and which are charged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_mq import RetryPolicy, fixed, handler
from tests.rows import add
from tests.worker.conftest import PATIENCE, Running, Said, add_many, attempts_of, effect, effects

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]


class Blocker:
    """A handler that blocks the thread of all async handlers until `gate` opens."""

    def __init__(self, timeout: float) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()

        @handler(
            "#",
            queue="mail",
            name="block",
            timeout=timeout,
            retry=RetryPolicy(backoff=fixed(600)),
        )
        async def block(delivery: Any) -> None:
            await sync_to_async(self._block)()

        self.message = add(handler="block")

    def _block(self) -> None:
        self.entered.set()
        assert self.gate.wait(PATIENCE * 4)


@pytest.fixture
def make_blocker() -> Iterator[Callable[..., Blocker]]:
    made: list[Blocker] = []

    def make(timeout: float = PATIENCE * 4) -> Blocker:
        made.append(Blocker(timeout))
        return made[0]

    yield make
    for each in made:
        each.gate.set()


def test_an_ack_does_not_wait_for_a_neighbours_thread(
    start: Start, said: Said, make_blocker: Callable[..., Blocker]
) -> None:
    blocker = make_blocker()
    running = start(queues=["mail"])
    assert blocker.entered.wait(PATIENCE)

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        await asyncio.sleep(0)

    quick = add_many(20, handler="h")
    said.wait("message_acked", 20)
    assert sorted(said.ids("message_acked")) == sorted(message.pk for message in quick)
    blocker.gate.set()
    said.wait("message_acked", 21)
    assert running.stop()


def test_what_has_finished_is_off_the_scoreboard(
    start: Start, said: Said, make_blocker: Callable[..., Blocker]
) -> None:
    """If the supervisor ends the process for a neighbour, it charges messages on the scoreboard."""
    blocker = make_blocker()

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        await asyncio.sleep(0)

    quick = add(handler="h")
    running = start(queues=["mail"])
    assert blocker.entered.wait(PATIENCE)
    said.wait("message_acked")
    run = running.worker._run
    assert run is not None
    assert quick.pk not in run.parts.scoreboard.running()
    assert blocker.message.pk in run.parts.scoreboard.running()
    blocker.gate.set()
    assert running.stop()


def test_a_call_that_outlasts_its_handler_stays_on_the_scoreboard(
    start: Start, said: Said, make_blocker: Callable[..., Blocker]
) -> None:
    """Guarantee 23: a thread cannot be cancelled, so the supervisor can still end the process.

    A neighbour that times out while it waits for that thread is settled at once.
    """
    blocker = make_blocker(timeout=0.05)
    cancelled: list[int] = []

    @handler("#", queue="mail", name="h", timeout=0.05, retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        try:
            await sync_to_async(effect)(delivery)
        except asyncio.CancelledError:
            cancelled.append(delivery.id)
            raise

    running = start(queues=["mail"])
    assert blocker.entered.wait(PATIENCE)
    behind = add(handler="h")
    assert said.wait("message_retried")[0].id == behind.pk
    assert cancelled == [behind.pk]
    run = running.worker._run
    assert run is not None
    assert run.parts.scoreboard.running() == [blocker.message.pk]
    blocker.gate.set()
    said.wait("message_retried", 2)
    assert attempts_of(blocker.message) == ["django_mq.policy.outcomes.TimedOut"]
    assert effects() == set()
    assert running.stop()


def test_connections_of_that_thread_are_tidied_between_deliveries(start: Start, said: Said) -> None:
    """One handler's broken connection is not passed on to the next."""
    seen: list[int] = []

    def break_it() -> None:
        with connection.cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            seen.append(cursor.fetchone()[0])
        connection.errors_occurred = True
        connection.connection.close()

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        if seen:
            await sync_to_async(effect)(delivery)
        else:
            await sync_to_async(break_it)()

    add(handler="h")
    running = start(queues=["mail"])
    said.wait("message_acked")
    second = add(handler="h")
    said.wait("message_acked", 2)
    assert effects() == {second.pk}
    assert running.stop()


def _enter_a_block() -> None:
    transaction.atomic().__enter__()


def _turn_autocommit_off() -> None:
    transaction.set_autocommit(False)


def _begin() -> None:
    with connection.cursor() as cursor:
        cursor.execute("begin")


@pytest.mark.parametrize("leaves_open", [_enter_a_block, _turn_autocommit_off, _begin])
@pytest.mark.parametrize("fails", [True, False])
def test_a_transaction_that_is_left_open_in_that_thread_takes_no_neighbour_along(
    start: Start, said: Said, leaves_open: Callable[[], None], fails: bool
) -> None:
    """Otherwise a neighbour is acked, and its writes are never committed."""

    def leave_open(delivery: Any) -> None:
        leaves_open()
        effect(delivery)
        if fails:
            raise ValueError

    @handler("#", queue="mail", name="culprit", retry=RetryPolicy(backoff=fixed(600)))
    async def culprit(delivery: Any) -> None:
        await sync_to_async(leave_open)(delivery)

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        await sync_to_async(effect)(delivery)

    left = add(handler="culprit")
    running = start(queues=["mail"])
    said.wait("message_retried")
    neighbour = add(handler="h")
    said.wait("message_acked")
    assert effects() == {neighbour.pk}
    error = "ValueError" if fails else "django_mq.exceptions.HandlerBrokeTransaction"
    assert attempts_of(left) == [error]
    assert running.stop()
