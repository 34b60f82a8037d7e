"""Calls of async handlers in other threads than the shared one leave nothing to the next call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from django.db.utils import OperationalError

from django_mq import handler
from testproject.shop.models import Product
from tests.executor.breaking import terminate_and_use
from tests.executor.other_threads import (
    LATER,
    Way,
    are_gone,
    begin,
    enter_a_block,
    own_pid,
    query,
    send,
    turn_autocommit_off,
    ways,
)
from tests.other_alias import _other_alias  # noqa: F401  (fixture)
from tests.slow import mostly_slow, slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, Said, attempts_of, effect, effects

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

Start = Callable[..., Running]


@pytest.fixture
def _pooled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The second alias has a pool of two sessions."""
    other = connections.settings["other"]
    pool = {"min_size": 1, "max_size": 2, "timeout": PATIENCE}
    monkeypatch.setitem(other, "OPTIONS", {**other["OPTIONS"], "pool": pool})
    yield
    DatabaseWrapper._connection_pools.pop("other").close()


@ways
def test_a_lost_session_is_not_the_next_calls(start: Start, said: Said, way: Way) -> None:
    """Django keeps a broken connection until a request ends, and here none does."""

    def lose(delivery: Any) -> None:
        connection.ensure_connection()
        terminate_and_use(delivery)

    @handler("#", queue="mail", name="culprit", retry=LATER)
    async def culprit(delivery: Any) -> None:
        with pytest.raises(OperationalError):
            await way(lose, delivery)

    @handler("#", queue="mail", name="h", retry=LATER)
    async def h(delivery: Any) -> None:
        await way(effect, delivery)

    send("culprit")
    running = start(queues=["mail"])
    said.wait("message_acked")
    second = send("h")
    until(lambda: said.count("message_acked") == 2 or said.count("message_retried"))
    assert effects() == {second.pk}
    assert running.stop()


@ways
@pytest.mark.parametrize(
    ("leaves_open", "alias", "suspect"),
    [
        (enter_a_block, "default", False),
        (turn_autocommit_off, "default", False),
        *slow((begin, "other", False), (turn_autocommit_off, "default", True)),
    ],
)
def test_a_transaction_that_is_left_open_takes_no_neighbour_along(
    start: Start,
    said: Said,
    way: Way,
    leaves_open: Callable[[str], None],
    alias: str,
    suspect: bool,
) -> None:
    """Otherwise a neighbour is acked, and its writes are never committed."""

    def write(delivery: Any) -> None:
        Product.objects.using(alias).create(name=f"message {delivery.id}", price=1)

    def leave_open(delivery: Any) -> None:
        leaves_open(alias)
        write(delivery)

    @handler("#", queue="mail", name="culprit", retry=LATER)
    async def culprit(delivery: Any) -> None:
        assert threading.current_thread().name == "mq-async"
        await way(leave_open, delivery)

    @handler("#", queue="mail", name="h", retry=LATER)
    async def h(delivery: Any) -> None:
        await way(write, delivery)

    left = send("culprit", suspect=suspect)
    running = start(queues=["mail"])
    until(lambda: said.count("message_retried") or said.count("message_acked"))
    neighbour = send("h")
    said.wait("message_acked")
    assert effects() == {neighbour.pk}
    assert attempts_of(left) == ["django_mq.exceptions.HandlerBrokeTransaction"]
    assert running.stop()


@ways
def test_the_error_of_a_call_is_not_replaced(start: Start, said: Said, way: Way) -> None:
    def fail(delivery: Any) -> None:
        turn_autocommit_off("default")
        effect(delivery)
        raise ValueError

    @handler("#", queue="mail", name="culprit", retry=LATER)
    async def culprit(delivery: Any) -> None:
        await way(fail, delivery)

    left = send("culprit")
    running = start(queues=["mail"])
    said.wait("message_retried")
    assert attempts_of(left) == ["ValueError"]
    assert effects() == set()
    assert running.stop()


@ways
def test_calls_at_the_same_time_leave_no_session(start: Start, said: Said, way: Way) -> None:
    """Each of these threads would else keep a session for as long as the process lives."""
    meeting = threading.Barrier(3, timeout=PATIENCE)
    pids: list[int] = []

    def meet() -> None:
        for alias in ("default", "other"):
            pids.append(own_pid(alias))
        meeting.wait()

    @handler("#", queue="mail", name="h", retry=LATER)
    async def h(delivery: Any) -> None:
        await asyncio.gather(*[way(meet) for _ in range(3)])

    send("h")
    running = start(queues=["mail"])
    said.wait("message_acked")
    assert len(set(pids)) == 6
    until(lambda: are_gone(pids), "the sessions are closed")
    assert running.stop()


@pytest.mark.usefixtures("_pooled")
@ways
def test_more_threads_than_a_pool_has_sessions(start: Start, said: Said, way: Way) -> None:
    """A thread that kept its session would keep it from all others, the shared one included."""
    meeting = threading.Barrier(4, timeout=PATIENCE)
    pids: list[int] = []

    def meet() -> None:
        meeting.wait()  # so that each call has a thread of its own
        pids.append(own_pid("other"))

    @handler("#", queue="mail", name="h", retry=LATER)
    async def h(delivery: Any) -> None:
        await asyncio.gather(*[way(meet) for _ in range(4)])
        await sync_to_async(own_pid)("other")

    send("h")
    running = start(queues=["mail"])
    said.wait("message_acked")
    assert len(pids) == 4
    assert len(set(pids)) <= 2
    assert running.stop()


LEAVE = {
    "setting": "select set_config('app.tenant', 'left', false)",
    "lock": "select pg_advisory_lock(7)::text",
}
SEEN = """
select row(coalesce(current_setting('app.tenant', true), ''),
           (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())
          )::text
"""


@pytest.mark.parametrize(("statement", "pooled"), mostly_slow([*LEAVE.values()], [False, True]))
def test_session_state_of_a_call_does_not_reach_the_next_handler(
    start: Start, said: Said, statement: str, pooled: bool, request: pytest.FixtureRequest
) -> None:
    if pooled:
        request.getfixturevalue("_pooled")
    seen: list[str] = []

    def leave() -> None:
        seen.append(query(SEEN, "other"))
        query(statement, "other")

    @handler("#", queue="mail", name="h", retry=LATER)
    async def h(delivery: Any) -> None:
        await asyncio.to_thread(leave)

    running = start(queues=["mail"])
    for count in (1, 2, 3):
        send("h")
        said.wait("message_acked", count)
    assert seen == ['("",0)'] * 3
    until(no_advisory_locks, "an idle session holds no lock")
    assert running.stop()


def no_advisory_locks() -> bool:
    return bool(query("select not exists (select 1 from pg_locks where objid = 7)"))


def test_a_call_whose_handler_no_longer_waits_is_cleaned_up_too(
    start: Start, said: Said, gate: threading.Event
) -> None:
    pids: list[int] = []

    def leave_open(delivery: Any) -> None:
        turn_autocommit_off("default")
        effect(delivery)
        pids.append(own_pid())
        assert gate.wait(PATIENCE)

    @handler("#", queue="mail", name="culprit", retry=LATER)
    async def culprit(delivery: Any) -> None:
        call = asyncio.ensure_future(asyncio.to_thread(leave_open, delivery))
        await asyncio.to_thread(until, lambda: pids)
        call.cancel()

    send("culprit")
    running = start(queues=["mail"])
    said.wait("message_acked")
    gate.set()
    until(lambda: are_gone(pids), "the session is closed")
    assert effects() == set()
    assert running.stop()


def test_a_call_within_a_call_is_in_its_transaction(start: Start, said: Said) -> None:
    """asgiref brings it back to the thread that waits: there only the outer call has an end."""

    @handler("#", queue="mail", name="h", retry=LATER)
    async def h(delivery: Any) -> None:
        await asyncio.to_thread(outer, delivery)
        await sync_to_async(outer, thread_sensitive=False)(delivery)

    inside: list[bool] = []

    @transaction.atomic
    def outer(delivery: Any) -> None:
        async_to_sync(inner)(delivery)
        inside.append(connection.in_atomic_block and own_pid() == pids[-1])
        transaction.set_rollback(len(inside) == 1)

    async def inner(delivery: Any) -> None:
        await sync_to_async(write)(delivery)

    pids: list[int] = []

    def write(delivery: Any) -> None:
        effect(delivery)
        pids.append(own_pid())

    message = send("h")
    running = start(queues=["mail"])
    said.wait("message_acked")
    assert inside == [True, True]
    assert effects() == {message.pk}
    assert running.stop()
