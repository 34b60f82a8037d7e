"""Unique ids where messages end: whatever the end, and in the transaction that makes it so."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from django_mq import (
    Delivery,
    Message,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    broadcast,
    broadcast_many,
    handler,
    queues,
)
from django_mq.conf import get_settings
from django_mq.messages import Fence
from django_mq.models import QueuedMessage, QueueState, UniqueKey
from django_mq.testing import drain
from django_mq.worker import chores
from django_mq.worker.recovery import DeadWorker
from tests.database import second_connection
from tests.worker.conftest import Bench, Said, Start

pytestmark = pytest.mark.django_db(transaction=True)


def send(n: int = 0, type: str = "a.b", **options: Any) -> Any:
    with transaction.atomic():
        return broadcast(type, n, **{"unique_id": "u", **options})


def the_message() -> QueuedMessage:
    return QueuedMessage.objects.get()


def subscribe(function: Callable[..., Any], **options: Any) -> list[Any]:
    """Subscribe a handler that notes what it gets and calls `function`; return what it got."""
    got: list[Any] = []

    def handle(delivery: Delivery) -> None:
        got.append(delivery.payload)
        function(delivery)

    handler("a.b", **{"name": "h", "queue": "mail", **options})(handle)
    return got


def free() -> bool:
    """Say whether the id can be taken; nothing is changed."""
    with transaction.atomic():
        found = broadcast("a.b", unique_id="u").outcome == "added"
        transaction.set_rollback(True)
    return found


def requeue_within(delivery: Delivery) -> None:
    if delivery.payload == 0:
        with transaction.atomic():
            assert broadcast("a.b", 1, unique_id="u", on_duplicate="requeue").outcome == "requeued"


@pytest.mark.parametrize("atomic", [True, False])
def test_an_ack_frees_the_id(atomic: bool) -> None:
    """CAR-19, CAR-29."""
    subscribe(lambda delivery: None, atomic=atomic)
    send()
    assert not free()
    drain()
    assert free()
    assert not UniqueKey.objects.exists()


@pytest.mark.parametrize("atomic", [True, False])
def test_an_ack_begins_the_quiet_time(atomic: bool) -> None:
    """CAR-23."""
    subscribe(lambda delivery: None, atomic=atomic)
    send(unique_for=60)
    drain()
    assert send(1).copies[0].reason == "quiet"


@pytest.mark.parametrize(
    "error", [Retry(after=60), Snooze(60), ValueError("no")], ids=["retry", "snooze", "error"]
)
def test_what_runs_again_keeps_its_id(error: Exception) -> None:
    """CAR-24."""

    def fail(delivery: Delivery) -> None:
        raise error

    got = subscribe(fail)
    [id] = send(unique_for=60).ids
    drain(errors="keep")
    assert got == [0]
    assert UniqueKey.objects.get().message_id == id
    assert send(1).copies[0].reason == "waiting"


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("error", "retry"),
    [(Reject("never"), None), (ValueError("no"), RetryPolicy.never())],
    ids=["rejected", "exhausted"],
)
def test_a_death_frees_the_id_and_lets_what_is_aside_run(
    error: Exception, retry: RetryPolicy | None, atomic: bool
) -> None:
    """CAR-25, CAR-28: whenever the message is done, also after an error."""

    def fail(delivery: Delivery) -> None:
        if not atomic:  # what an atomic one broadcasts is undone with it
            requeue_within(delivery)
        if delivery.payload == 0:
            raise error

    got = subscribe(fail, atomic=atomic)
    send(retry=retry, unique_for=60)
    drain(errors="keep")
    assert QueuedMessage.objects.get(dead_at__isnull=False).unique_id == "u"
    assert got == ([0] if atomic else [0, 1])
    assert free()


def test_a_handler_may_requeue_itself() -> None:
    """CAR-10, CAR-19: what it puts aside commits with its own end."""
    got = subscribe(requeue_within)
    send(0)
    drain()
    assert got == [0, 1]
    assert free()


def test_a_handler_that_fails_has_put_nothing_aside() -> None:
    def fail(delivery: Delivery) -> None:
        broadcast("a.b", 1, unique_id="u", on_duplicate="requeue")
        raise Reject("no")

    got = subscribe(fail)
    send(0)
    drain()
    assert got == [0]
    assert not UniqueKey.objects.exists()


def test_a_finish_frees_the_id_with_its_own_writes() -> None:
    """CAR-29: in the same step."""
    seen: list[bool] = []

    def function(delivery: Delivery) -> None:
        requeue_within(delivery)
        if delivery.payload == 0:
            with delivery.finish():
                seen.append(UniqueKey.objects.filter(message_id=delivery.id).exists())
            seen.append(UniqueKey.objects.filter(message_id=delivery.id).exists())

    got = subscribe(function, atomic=False)
    send(0)
    drain()
    assert (got, seen) == ([0, 1], [True, False])
    assert free()


def test_a_finish_that_fails_keeps_the_id() -> None:
    def function(delivery: Delivery) -> None:
        with delivery.finish():
            raise Reject("no")

    subscribe(function, atomic=False)
    send(0, unique_for=60)
    drain()
    assert QueuedMessage.objects.get().dead_reason == "no"
    assert free()


def test_a_finish_in_async_handlers(start: Start) -> None:
    """CAR-23."""

    @handler("a.b", name="h", queue="mail")
    async def function(delivery: Delivery) -> None:
        await delivery.afinish(lambda: None)

    send(0, unique_for=60)
    start(until_empty=True).join()
    assert send(1).copies[0].reason == "quiet"


def test_an_unrouted_message_is_freed_under_the_name_it_was_taken() -> None:
    """Broadcast where no handler was known; a worker found two."""
    send(0, queue="mail", unique_for=60)
    got = subscribe(lambda delivery: None)
    more = subscribe(lambda delivery: None, name="second")
    drain()
    assert (got, more) == ([0], [0])
    key = UniqueKey.objects.get()
    assert (key.handler, key.message_id, key.quiet_until is not None) == ("", None, True)


def test_a_lost_lease_frees_nothing(bench: Bench) -> None:
    """Guarantee 4: the fence holds for the id, too."""
    got = subscribe(lambda delivery: None)
    [id] = send().ids
    tasks = bench.claim()
    QueuedMessage.objects.update(attempts=7)
    bench.run_all(tasks)
    assert got == [0] * bench.fresh  # which may start before it is known
    assert UniqueKey.objects.get().message_id == id
    assert the_message().pk == id


def test_an_expired_message_frees_its_id() -> None:
    subscribe(lambda delivery: None)
    send(expires=60)
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    assert the_message().dead_reason == "expired"
    assert not UniqueKey.objects.exists()


def test_what_a_dead_process_is_charged_with_frees_its_id(start: Start, said: Said) -> None:
    """The last attempt dies with its process: a sibling settles it, and what is aside runs."""
    got = subscribe(lambda delivery: None)
    send(0, retry=RetryPolicy.never())
    QueuedMessage.objects.update(
        claimed_by="dead:1", attempts=1, leased_until=Now() + timedelta(minutes=5)
    )
    send(1, on_duplicate="requeue")
    message = the_message()
    running = start()
    said.wait("worker_started")
    dead = DeadWorker("dead", "killed", lost=[Fence(message.pk, 1, "dead:1")])
    running.worker.recover(dead, lambda: None)
    said.wait("message_acked")
    running.stop()
    assert got == [1]
    assert QueuedMessage.objects.get().dead_reason == "exhausted"
    assert not UniqueKey.objects.exists()


def test_the_chores_bring_forward_what_nobody_else_did() -> None:
    """A last attempt that vanished with its host; a row that was deleted by hand."""
    for n, ending in enumerate(("dead", "deleted")):
        send(n, unique_id=ending)
    QueuedMessage.objects.update(claimed_by="w:1", leased_until=Now())
    for n, ending in enumerate(("dead", "deleted")):
        send(n + 10, unique_id=ending, on_duplicate="requeue")
    QueuedMessage.objects.filter(unique_id="deleted").delete()
    QueuedMessage.objects.update(
        claimed_by=None, leased_until=None, dead_at=Now(), dead_reason="exhausted"
    )
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    waiting = QueuedMessage.objects.filter(dead_at=None)
    assert sorted(waiting.values_list("payload", flat=True)) == [10, 11]
    held = UniqueKey.objects.values_list("message_id", flat=True)
    assert set(held) == set(waiting.values_list("pk", flat=True))


def test_the_chores_wait_for_nobody_long() -> None:
    """An id that another session is taking is left for later: other chores come next."""
    send(0)
    QueuedMessage.objects.update(claimed_by="w:1", leased_until=Now())
    send(1, on_duplicate="requeue")
    QueuedMessage.objects.all().delete()
    with second_connection() as other, other.transaction(force_rollback=True):
        other.execute("select from django_mq_uniquekey where put_aside is null for update")
        with second_connection() as own:
            own.execute("set statement_timeout = '60s'")
            chores.run(own.cursor(), get_settings())
            own.execute("select 1")
    assert not QueuedMessage.objects.exists()


def test_the_chores_forget_quiet_times_that_are_over() -> None:
    subscribe(lambda delivery: None)
    for id in ("old", "new"):
        send(unique_id=id, unique_for=60)
    drain()
    UniqueKey.objects.filter(unique_id="old").update(quiet_until=Now())
    with second_connection() as own:
        chores.run(own.cursor(), get_settings())
    assert UniqueKey.objects.get().unique_id == "new"


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
def test_what_operators_remove_frees_its_id(remove: Callable[[int], Any]) -> None:
    [id] = send(0, unique_for=60).ids
    assert remove(id).ids == (id,)
    assert not UniqueKey.objects.exists()


def test_what_is_put_aside_is_another_message_that_stays() -> None:
    """Guarantee 14: an operator removed the one that was to be seen."""
    [id] = send(0).ids
    QueuedMessage.objects.update(claimed_by="w:1", leased_until=Now())
    send(1, on_duplicate="requeue")
    QueuedMessage.objects.update(claimed_by=None, leased_until=None)
    assert queues.cancel(id).ids == (id,)
    assert the_message().payload == 1


# All of it


def test_producers_and_workers_at_once(start: Start) -> None:
    """Every accepted message is handled once, at most one of an id at a time, and all end."""
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
