"""A worker claims coroutines before a slot is free, so that no slot waits for a claim."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from django_mq import handler
from django_mq.executor import async_slots, waiting_coroutines
from django_mq.executor.settlement import Settlement
from django_mq.models import QueuedMessage
from django_mq.worker.dispatch import Dispatch
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import Running, add_many, waiting

pytestmark = pytest.mark.django_db(transaction=True)

#: As it is outside of these tests.
WINDOW = async_slots.WINDOW

Start = Callable[..., Running]


class Gated:
    """An async handler whose calls wait, each at a gate of its own."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self._gates: dict[int, threading.Event] = {}
        self._all = False

    async def __call__(self, delivery: Any) -> None:
        gate = self._gates.setdefault(delivery.id, threading.Event())
        self.began.append(delivery.id)
        while not (gate.is_set() or self._all):
            await asyncio.sleep(0.005)

    def open(self, id: int) -> None:
        self._gates.setdefault(id, threading.Event()).set()

    def open_all(self) -> None:
        self._all = True


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    """Each call that has ended counts as lately ended and short: half of the slots are ahead."""
    monkeypatch.setattr(async_slots, "WINDOW", 3600.0)
    monkeypatch.setattr(async_slots, "AHEAD_SECONDS", 3600.0)
    gated = Gated()

    async def h(delivery: Any) -> None:
        await gated(delivery)

    handler("#", queue="mail", name="h")(h)
    yield gated
    gated.open_all()


def claimed() -> set[int]:
    claims = QueuedMessage.objects.filter(claimed_by__isnull=False)
    return set(claims.values_list("id", flat=True))


def attempts(id: int) -> int:
    return QueuedMessage.objects.get(pk=id).attempts


def test_the_next_starts_without_a_statement(
    start: Start,
    gated: Gated,
    other: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not wait for the thread that claims, which may wait for the server."""
    first, second, third, *_ = ids = [message.pk for message in add_many(5, handler="h")]
    gated.open(first)
    start(async_slots=2)
    until(lambda: gated.began == [first, second, third])
    until(lambda: claimed() == {second, third, ids[3]})  # one ahead, and no more
    with other.transaction():
        other.execute("lock table django_mq_queuedmessage in access exclusive mode")
        monkeypatch.setattr(Dispatch, "start_coroutines", lambda self: None)
        gated.open(second)
        until(lambda: gated.began == ids[:4])
    monkeypatch.undo()
    gated.open_all()
    until(lambda: not waiting())
    assert gated.began == ids


def test_message_that_does_not_start_soon_goes_to_another_worker(
    start: Start, gated: Gated, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a second, whenever the worker would look again."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "POLL_INTERVAL": 600}
    first, *others = [message.pk for message in add_many(4, handler="h")]
    gated.open(first)
    start(async_slots=2)
    until(lambda: gated.began == [first, *others[:2]])
    until(lambda: claimed() == set(others))
    monkeypatch.setattr(async_slots, "WINDOW", WINDOW)
    until(lambda: claimed() == set(others[:2]))
    assert attempts(others[2]) == 0  # it was never started
    gated.open(others[2])
    start(async_slots=2)
    until(lambda: others[2] not in waiting())
    assert waiting() == set(others[:2])


def test_stop_releases_messages_claimed_ahead(start: Start, gated: Gated) -> None:
    first, *others = [message.pk for message in add_many(4, handler="h")]
    gated.open(first)
    running = start(async_slots=2, drain_seconds=30.0)
    until(lambda: len(claimed()) == 3)
    running.worker.ask_to_stop()
    until(lambda: len(claimed()) == 2)
    gated.open_all()
    assert running.stop()
    assert waiting() == {others[2]}
    assert attempts(others[2]) == 0


def test_lapsed_message_is_taken_over_before_the_backlog(
    start: Start, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if more messages wait for slots than will be free soon."""
    # A message that is released unstarted goes by its due time, which is the last one here.
    monkeypatch.setattr(waiting_coroutines, "SLOT_WAIT_SECONDS", 600.0)
    many = [message.pk for message in add_many(1_000, handler="h")]
    gated.open(many[0])
    start(async_slots=2)
    until(lambda: len(claimed()) == 3)
    lapsed = add(handler="h", claimed_by="gone:1", leased=-1.0, attempts=1).pk
    gated.open(lapsed)
    for number, id in enumerate(many[1:], 2):
        if lapsed in gated.began:
            break
        gated.open(id)
        until(lambda number=number: len(gated.began) > number)
    until(lambda: lapsed not in waiting())
    assert len(gated.began) < 1_000


def test_a_settle_that_frees_room_wakes_the_worker(
    start: Start, gated: Gated, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that end fast wait for their settles, and no call ends after the last of these."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "POLL_INTERVAL": 600}
    settle = Settlement.settle

    def slow(self: Settlement, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)  # a commit that waits for a standby
        return settle(self, *arguments, **options)

    monkeypatch.setattr(Settlement, "settle", slow)
    monkeypatch.setattr(waiting_coroutines, "SLOT_WAIT_SECONDS", 600.0)
    gated.open_all()
    add_many(40, handler="h")
    start(async_slots=2)
    until(lambda: not waiting())


def test_lists_are_as_long_as_there_are_slots(start: Start) -> None:
    """They are not claimed ahead: those that wait would start alone."""
    lengths: list[int] = []

    @handler("#", queue="mail", name="h", batch=True)
    async def h(deliveries: Any) -> None:
        lengths.append(len(deliveries))
        await asyncio.sleep(0.001)

    add_many(200, handler="h")
    assert start(until_empty=True, async_slots=20).join()
    assert lengths == [20] * 10


def test_limit_in_flight_is_not_used_up_by_claims_ahead(
    start: Start, gated: Gated, settings: Any
) -> None:
    settings.DJANGO_MQ = {
        **getattr(settings, "DJANGO_MQ", {}),
        "QUEUES": {"mail": {"max_in_flight": 3}},
    }
    first, *others = [message.pk for message in add_many(6, handler="h")]
    gated.open(first)
    start(async_slots=2)
    until(lambda: gated.began == [first, *others[:2]])
    start(async_slots=2)
    until(lambda: len(gated.began) == 4)
    assert claimed() == set(others[:3])
