"""A coroutine starts, and its slot is freed, without waiting for another statement."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_mq import handler
from tests.database import second_connection
from tests.rows import add
from tests.worker.conftest import PATIENCE, Running, add_many, waiting

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Running]

#: Notes each message that gets a lease while it still has one.
WATCH = """
create table mq_given_anew (id bigint);
create function mq_note() returns trigger language plpgsql as
    $$ begin insert into mq_given_anew values (new.id); return new; end $$;
create trigger mq_note before update on django_mq_queuedmessage for each row
    when (old.leased_until is not null and new.claimed_by = old.claimed_by)
    execute function mq_note()
"""
LOCK = "select from django_mq_queuedmessage where id = %s for update"


@pytest.fixture
def leases_given_anew() -> Iterator[Callable[[], set[int]]]:
    with second_connection() as other:
        other.execute(WATCH)
        try:
            yield lambda: {id for (id,) in other.execute("select id from mq_given_anew")}
        finally:
            other.execute("drop function mq_note cascade; drop table mq_given_anew")


def test_only_messages_with_a_key_are_locked_first(
    start: Start, leases_given_anew: Callable[[], set[int]]
) -> None:
    """A newly claimed message is ours; one of a line is checked first."""

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None: ...

    add_many(20, handler="h")
    keyed = [add(handler="h", key=f"key{number}").pk for number in range(3)]
    assert start(until_empty=True).join()
    assert waiting() == set()
    assert leases_given_anew() == set(keyed)


@pytest.fixture
def lock_row() -> Iterator[Callable[[int], object]]:
    """Lock rows in another session, until the end of the test."""
    with second_connection() as other, other.transaction():
        yield lambda id: other.execute(LOCK, [id])


def test_a_slot_is_free_before_the_settle(
    start: Start, lock_row: Callable[[int], object], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    both = threading.Event()

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        ran.append(delivery.id)
        if len(ran) == 1:  # its ack waits for this lock
            await asyncio.to_thread(lock_row, delivery.id)
        else:
            both.set()

    add_many(2, handler="h")
    running = start(async_slots=1, drain_seconds=0.1)
    assert both.wait(PATIENCE)
    assert ran[0] in waiting()
    assert "settle_refused" not in [getattr(each, "event", "") for each in caplog.records]
    running.stop()


def test_number_of_unsettled_messages_is_bounded(
    start: Start, lock_row: Callable[[int], object]
) -> None:
    """At most as many as there are slots, beside the running ones: a worker's memory is bounded."""
    ran: list[int] = []
    four = threading.Event()

    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        await asyncio.to_thread(lock_row, delivery.id)
        ran.append(delivery.id)
        if len(ran) == 4:
            four.set()

    messages = add_many(6, handler="h")
    running = start(async_slots=2, drain_seconds=0.1)
    assert four.wait(PATIENCE)
    run = running.worker._run
    assert run is not None
    assert run.parts.local_queue.slots.room() == 0
    running.stop()
    assert len(ran) == 4
    assert waiting() == {message.pk for message in messages}
