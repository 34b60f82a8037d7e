"""Unique ids of dead letters and of messages that operators change; producers beside workers."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from django_mq import (
    Delivery,
    Message,
    Reject,
    RetryPolicy,
    broadcast,
    broadcast_many,
    handler,
    queues,
)
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage, QueueState, UniqueKey
from django_mq.testing import drain
from django_mq.worker import chores
from tests.database import second_connection
from tests.rows import the_message
from tests.worker.conftest import Start
from tests.worker.unique import free, send, subscribe

pytestmark = pytest.mark.django_db(transaction=True)


# Operators


def dead_letter(n: int = 0) -> int:
    [id] = send(n).ids
    QueuedMessage.objects.filter(pk=id).update(dead_at=Now(), dead_reason="exhausted")
    return id  # type: ignore[no-any-return]


def test_a_requeued_dead_letter_takes_its_id_again() -> None:
    id = dead_letter()
    assert queues.requeue(id).ids == (id,)
    assert UniqueKey.objects.get().message_id == id
    assert not free()


def test_a_dead_letter_whose_id_was_taken_is_skipped() -> None:
    """Never two live messages of one id."""
    id = dead_letter()
    send(1)
    changed = queues.requeue(id)
    assert (changed.ids, changed.skipped) == ((), 1)
    assert QueuedMessage.objects.get(pk=id).dead_at is not None


def test_a_dead_letter_whose_id_is_quiet_is_skipped_until_it_is_over() -> None:
    """CAR-23: handled once in that time."""
    subscribe(lambda delivery: None)
    id = dead_letter()
    with transaction.atomic():
        broadcast("a.b", 1, unique_id="u", unique_for=60)
    drain()
    assert queues.requeue(id).skipped == 1
    UniqueKey.objects.update(quiet_until=Now())
    assert queues.requeue(id).ids == (id,)


def test_of_several_dead_letters_with_one_id_the_last_is_requeued() -> None:
    old, new = dead_letter(0), dead_letter(1)
    changed = queues.requeue([old, new])
    assert (changed.ids, changed.skipped) == ((new,), 1)


def test_a_requeued_dead_letter_has_its_quiet_time() -> None:
    """CAR-23."""
    subscribe(lambda delivery: None)
    [id] = send(0, unique_for=60).ids
    QueuedMessage.objects.update(dead_at=Now(), dead_reason="exhausted")
    with connection.cursor() as cursor:
        cursor.execute("delete from django_mq_uniquekey")
    queues.requeue(id)
    drain()
    assert send(1).copies[0].reason == "quiet"


@pytest.mark.parametrize("remove", [queues.cancel, lambda id: queues.purge(waiting=True)])
def test_removal_by_an_operator_frees_the_id(remove: Callable[[int], Any]) -> None:
    [id] = send(0, unique_for=60).ids
    assert remove(id).ids == (id,)
    assert not UniqueKey.objects.exists()


def test_put_aside_message_survives_the_removal_of_the_first() -> None:
    """Guarantee 14: an operator removed the visible one."""
    [id] = send(0).ids
    QueuedMessage.objects.update(claimed_by="w:1", leased_until=Now())
    send(1, on_duplicate="requeue")
    QueuedMessage.objects.update(claimed_by=None, leased_until=None)
    assert queues.cancel(id).ids == (id,)
    assert the_message().payload == 1


# All of it


def test_producers_and_workers_at_once(start: Start) -> None:
    """Every accepted message is handled once, at most one per id at a time, and all end."""
    producers, calls, ids = 8, 12, ["a", "b", "c"]
    handled: list[int] = []
    running: Counter[str] = Counter()
    together: list[str] = []
    lock = threading.Lock()

    @handler("a.b", name="h", queue="mail", retry=RetryPolicy(2, lambda attempt: 0))
    def function(delivery: Delivery) -> None:
        id, n = delivery.payload
        with lock:
            running[id] += 1
            if running[id] > 1:
                together.append(id)
        try:
            if n % 7 == 0 and delivery.attempt == 1:
                raise ValueError("once")
            if n % 11 == 0:
                raise Reject("never")
        finally:
            with lock:
                running[id] -= 1
        transaction.on_commit(lambda: handled.append(n))

    def produce(seed: int) -> dict[int, str]:
        chosen = random.Random(seed)
        told: dict[int, str] = {}
        try:
            for call in range(calls):
                numbers = [(seed * calls + call) * 4 + n for n in range(chosen.randint(1, 4))]
                options = ["skip", "update", "debounce", "replace", "requeue", "rerun"]
                messages = [
                    Message("a.b", [id, n], unique_id=id, on_duplicate=chosen.choice(options))
                    for n in numbers
                    for id in [chosen.choice(ids)]
                ]
                with transaction.atomic():
                    receipts = broadcast_many(messages)
                told.update(zip(numbers, [each.outcome for each in receipts], strict=True))
        finally:
            connections.close_all()
        return told

    worker = start(threads=3)
    with ThreadPoolExecutor(producers) as pool:
        told = {n: said for each in pool.map(produce, range(producers)) for n, said in each.items()}
    worker.stop()
    QueueState.objects.filter(queue=":").delete()
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    start(until_empty=True, threads=2).join()
    rejected = QueuedMessage.objects.filter(dead_at__isnull=False)
    dead = [row.payload[1] for row in rejected]
    ended = Counter([*handled, *dead])
    assert set(ended.values()) == {1}
    assert together == []
    assert set(ended) <= {n for n, outcome in told.items() if outcome != "duplicate"}
    added = sum(outcome == "added" for outcome in told.values())
    put_aside = sum(outcome == "requeued" for outcome in told.values())
    assert added <= len(ended) <= added + put_aside
    assert not QueuedMessage.objects.filter(dead_at=None).exists()
    assert not UniqueKey.objects.exists()
