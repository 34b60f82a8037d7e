"""Blocking calls of async handlers share one thread: which handlers wait, and which are charged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction

from django_mq import RetryPolicy, fixed, handler, signals
from django_mq.models import QueuedMessage
from tests.database import second_connection
from tests.rows import add
from tests.slow import slow
from tests.waiting import until
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


def test_finished_message_is_off_the_scoreboard(
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


LEAVE = {
    "setting": "set work_mem = '77MB'",
    "lock": "select pg_advisory_lock(7)",
    "table": "create temporary table left_behind as select 1",
}
SEEN = """
select pg_backend_pid(), current_setting('work_mem') = '77MB', to_regclass('pg_temp.left_behind'),
       array(select objid::int
               from pg_locks
              where locktype = 'advisory' and pid = pg_backend_pid())
"""


@pytest.mark.parametrize("left", ["lock", *slow("setting", "table")])
def test_session_state_of_a_call_does_not_reach_the_next_handler(
    start: Start, said: Said, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CONN_MAX_AGE the session is the same."""
    monkeypatch.setitem(connections[DEFAULT_DB_ALIAS].settings_dict, "CONN_MAX_AGE", None)
    seen: list[Any] = []

    def leave() -> None:
        with connection.cursor() as cursor:
            cursor.execute(SEEN)
            seen.append(cursor.fetchone())
            cursor.execute(LEAVE[left])

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        await sync_to_async(leave)()

    running = start(queues=["mail"])
    for count in (1, 2):
        with transaction.atomic():  # `add()` reads the row, which the worker removes
            add(handler="h")
        said.wait("message_acked", count)
    assert len({pid for pid, *_ in seen}) == 1
    assert [rest for _, *rest in seen] == [[False, None, []]] * 2
    assert running.stop()


def test_a_handler_that_ends_takes_no_neighbours_session_along(start: Start, said: Said) -> None:
    """A neighbour reads on from its cursor, on the connection that they share."""
    add_many(150, handler="slow", queue="other")
    neighbour_is_done = asyncio.Event()
    read: list[int] = []

    @handler("#", queue="mail", name="slow")
    async def slow(delivery: Any) -> None:
        messages = QueuedMessage.objects.filter(queue="other")
        async for message in messages.aiterator(chunk_size=10):
            if not read:
                send_a_neighbour()
                await neighbour_is_done.wait()
            read.append(message.pk)

    @handler("#", queue="mail", name="quick")
    async def quick(delivery: Any) -> None:
        await sync_to_async(effect)(delivery)

    def send_a_neighbour() -> None:
        loop = asyncio.get_running_loop()
        signals.message_acked.connect(acked, weak=False)
        loops.append(loop)
        with second_connection() as other:
            other.execute(
                "insert into django_mq_queuedmessage (queue, type, handler, payload)"
                " values ('mail', 'a.b', 'quick', '{}')"
            )

    loops: list[asyncio.AbstractEventLoop] = []

    def acked(sender: str, **data: Any) -> None:
        loops[0].call_soon_threadsafe(neighbour_is_done.set)

    add(handler="slow")
    running = start(queues=["mail"])
    try:
        said.wait("message_acked", 2)
    finally:
        signals.message_acked.disconnect(acked)
    assert len(read) == 150
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


def test_block_left_open_in_that_thread_does_not_affect_a_neighbour(
    start: Start, said: Said
) -> None:
    """Django remembers it until the next connection, and refuses a durable block within."""

    @handler("#", queue="mail", name="culprit", retry=RetryPolicy(backoff=fixed(600)))
    async def culprit(delivery: Any) -> None:
        await sync_to_async(_enter_a_block)()

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    async def h(delivery: Any) -> None:
        await delivery.afinish(effect, delivery)

    add(handler="culprit")
    running = start(queues=["mail"])
    said.wait("message_retried")
    neighbour = add(handler="h")
    until(lambda: said.count("message_acked") or said.count("message_retried") == 2)
    assert attempts_of(neighbour) == []
    assert effects() == {neighbour.pk}
    assert running.stop()
