"""Producers of one unique id wait for each other, but not for long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import BroadcastBusy, Message, broadcast, broadcast_many
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.outbox import deduplicate as deduping
from tests.database import until_any_blocked
from tests.outbox.races.conftest import (
    EXPIRES,
    PATIENCE,
    Holder,
    claimed,
    send,
    sleep_until_expired,
    uncommitted,
)
from tests.slow import slow

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("rollback", [False, True])
def test_a_producer_waits_for_the_transaction_that_adds_its_id(
    together: Callable[..., Future[Any]], rollback: bool
) -> None:
    """The second producer sees the outcome: a rollback frees the id."""
    first = Holder(together, uncommitted(1))
    second = together(send, 2)
    until_any_blocked()
    first.end(rollback=rollback)
    receipt = second.result(PATIENCE)
    assert receipt.outcome == ("added" if rollback else "duplicate")
    assert QueuedMessage.objects.get().payload == (2 if rollback else 1)


def test_a_producer_waits_for_the_one_that_updates(
    together: Callable[..., Future[Any]],
) -> None:
    """The last producer to write wins; neither is told that a worker has the message."""
    send(1)
    first = Holder(together, uncommitted(2, "update"))
    second = together(send, 3, "update")
    first.end()
    assert second.result(PATIENCE).outcome == "updated"
    assert QueuedMessage.objects.get().payload == 3


@pytest.mark.parametrize("rollback", [False, *slow(True)])
def test_an_expired_message_keeps_its_id_if_an_open_update_gives_it_more_time(
    together: Callable[..., Future[Any]], rollback: bool
) -> None:
    """It expires while the update is not committed: the other producer sees how that ends."""
    send(1, expires=EXPIRES)
    first = Holder(together, uncommitted(2, "update", expires=600))
    sleep_until_expired()
    second = together(send, 3)
    until_any_blocked()
    first.end(rollback=rollback)
    assert second.result(PATIENCE).outcome == ("added" if rollback else "duplicate")
    live = QueuedMessage.objects.with_state().exclude(state="expired")
    assert live.get().payload == (3 if rollback else 2)


def test_an_update_gives_no_time_to_a_message_whose_id_a_newer_one_has_taken(
    together: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked before the message expired, and writes after another producer was first."""
    send(1, expires=EXPIRES)
    look, looked, go_on = deduping._read_states, threading.Event(), threading.Event()

    def look_and_wait(*args: Any) -> Any:
        seen = look(*args)
        if not looked.is_set():
            looked.set()
            assert go_on.wait(PATIENCE)
        return seen

    monkeypatch.setattr(deduping, "_read_states", look_and_wait)
    update = together(lambda: send(2, "update", expires=600))
    assert looked.wait(PATIENCE)
    sleep_until_expired()
    newer = send(3)
    assert newer.outcome == "added"
    go_on.set()
    assert update.result(PATIENCE).outcome == "updated"
    live = QueuedMessage.objects.with_state().exclude(state="expired").get()
    assert (live.pk, live.payload) == (newer.copies[0].id, 2)


def test_message_that_an_old_snapshot_shows_as_expired_counts_as_claimed(
    together: Callable[..., Future[Any]],
) -> None:
    """A worker has claimed it in time, which this snapshot cannot see."""
    send(1, expires=EXPIRES)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("set transaction isolation level repeatable read")
        assert QueuedMessage.objects.count() == 1  # takes the snapshot
        together(claimed).result(PATIENCE)
        sleep_until_expired()
        assert broadcast("a.b", 2, unique_id="u").outcome == "duplicate"
    assert QueuedMessage.objects.count() == 1


def test_duplicate_does_not_wait_for_an_open_update(together: Callable[..., Future[Any]]) -> None:
    send(1)
    first = Holder(together, uncommitted(2, "update"))
    assert send(3).outcome == "duplicate"  # this thread would otherwise wait for ever
    first.end()


def test_a_producer_waits_for_the_one_that_puts_aside(
    together: Callable[..., Future[Any]],
) -> None:
    """CAR-10 as changed: the last one counts."""
    send(1)
    claimed()
    first = Holder(together, uncommitted(2, "requeue"))
    second = together(send, 3, "requeue")
    until_any_blocked()
    first.end()
    assert second.result(PATIENCE).outcome == "requeued"
    assert UniqueKey.objects.get(put_aside__isnull=False).put_aside["payload"] == 3


def test_busy_when_it_waits_for_too_long(
    together: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded, with advice; the transaction stays usable, and its limit is restored."""
    monkeypatch.setattr(deduping, "MAX_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(deduping, "SPREAD_SECONDS", 0.0)
    first = Holder(together, uncommitted(1))
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("set local lock_timeout = '7s'")
        with pytest.raises(BroadcastBusy, match=r"unique id u of a\.b in queue default.*Try again"):
            broadcast("a.b", 2, unique_id="u")
        broadcast("a.b", 3, unique_id="other")
        with connection.cursor() as cursor:
            cursor.execute("show lock_timeout")
            assert cursor.fetchone() == ("7s",)
    first.end()
    assert set(QueuedMessage.objects.values_list("payload", flat=True)) == {1, 3}


def test_one_of_two_transactions_that_wait_for_each_other_goes_on(
    together: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their calls are in opposite orders. If both gave up at once, neither would get through."""
    waits = iter([0.0, 0.0, 0.0, 60.0])
    monkeypatch.setattr(deduping, "MAX_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(deduping, "uniform", lambda low, high: next(waits))
    start = threading.Barrier(2)

    def produce(*ids: str) -> bool:
        with transaction.atomic(), contextlib.suppress(BroadcastBusy):
            broadcast("a.b", unique_id=ids[0])
            start.wait(PATIENCE)
            broadcast("a.b", unique_id=ids[1])
            return True
        return False

    calls = [together(produce, "one", "two"), together(produce, "two", "one")]
    assert sorted(call.result(PATIENCE) for call in calls) == [False, True]


def test_calls_take_their_ids_in_one_order(together: Callable[..., Future[Any]]) -> None:
    """Two calls with the same ids in opposite orders: one waits, neither fails."""
    ids = [f"id{n}" for n in range(300)]
    start = threading.Barrier(4)

    def produce(order: list[str]) -> int:
        start.wait(PATIENCE)
        with transaction.atomic():
            receipts = broadcast_many([Message("a.b", unique_id=id) for id in order])
        return sum(receipt.outcome == "added" for receipt in receipts)

    calls = [together(produce, order) for order in (ids, ids[::-1], ids, ids[::-1])]
    assert sum(call.result(PATIENCE) for call in calls) == len(ids)
    assert QueuedMessage.objects.count() == len(ids)
