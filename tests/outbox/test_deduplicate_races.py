"""Unique ids under concurrent producers and workers: real threads, real connections."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction

from django_mq import BroadcastBusy, Delivery, Message, broadcast, broadcast_many, handler, handlers
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.outbox import deduplicate as deduping
from django_mq.testing import drain
from tests.committing import quick_flush  # noqa: F401  (a fixture)
from tests.database import listening, second_connection

pytestmark = pytest.mark.django_db(transaction=True)

#: Longer than anything here takes, even on a busy machine.
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with handlers.isolated():
        yield


@pytest.fixture
def together() -> Iterator[Callable[..., Future[Any]]]:
    """Run functions in threads with connections of their own."""
    with ThreadPoolExecutor(16) as pool:

        def run(function: Callable[..., Any], *args: Any) -> Future[Any]:
            def call() -> Any:
                try:
                    return function(*args)
                finally:
                    connections.close_all()

            return pool.submit(call)

        yield run


def send(n: int, option: Any = "skip", **options: Any) -> Any:
    with transaction.atomic():
        return broadcast("a.b", n, unique_id="u", on_duplicate=option, **options)


def waits_for_a_lock(count: int = 1) -> None:
    """Return when so many sessions wait for a lock: somebody's transaction has to end first."""
    with second_connection() as other:
        for _ in range(int(PATIENCE / 0.01)):
            waiting = other.execute(
                "select count(*) from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock'"
            ).fetchone()
            if waiting and waiting[0] >= count:
                return
            other.execute("select pg_sleep(0.01)")
    raise AssertionError("nobody waits")


class Holder:
    """A transaction of another producer, open until it is told to end."""

    def __init__(self, together: Callable[..., Future[Any]], write: Callable[[], Any]) -> None:
        self._wrote, self._end = threading.Event(), threading.Event()
        self._rollback = False
        self._write = write
        self.future = together(self._run)
        assert self._wrote.wait(PATIENCE)

    def _run(self) -> Any:
        with transaction.atomic():
            receipt = self._write()
            self._wrote.set()
            assert self._end.wait(PATIENCE)
            transaction.set_rollback(self._rollback)
        return receipt

    def end(self, *, rollback: bool = False) -> Any:
        self._rollback = rollback
        self._end.set()
        return self.future.result(PATIENCE)


def uncommitted(n: int, option: Any = "skip", **options: Any) -> Callable[[], Any]:
    return lambda: broadcast("a.b", n, unique_id="u", on_duplicate=option, **options)


@pytest.mark.parametrize("rollback", [False, True])
def test_a_producer_waits_for_the_transaction_that_adds_its_id(
    together: Callable[..., Future[Any]], rollback: bool
) -> None:
    """And learns what became of it: a rollback frees the id."""
    first = Holder(together, uncommitted(1))
    second = together(send, 2)
    waits_for_a_lock()
    first.end(rollback=rollback)
    receipt = second.result(PATIENCE)
    assert receipt.outcome == ("added" if rollback else "duplicate")
    assert QueuedMessage.objects.get().payload == (2 if rollback else 1)


def test_a_producer_waits_for_the_one_that_updates(
    together: Callable[..., Future[Any]],
) -> None:
    """The last to write wins; neither is told that a worker has it."""
    send(1)
    first = Holder(together, uncommitted(2, "update"))
    second = together(send, 3, "update")
    first.end()
    assert second.result(PATIENCE).outcome == "updated"
    assert QueuedMessage.objects.get().payload == 3


def test_what_only_looks_waits_for_nobody(together: Callable[..., Future[Any]]) -> None:
    send(1)
    first = Holder(together, uncommitted(2, "update"))
    assert send(3).outcome == "duplicate"  # this thread would wait for ever
    first.end()


def test_a_producer_waits_for_the_one_that_puts_aside(
    together: Callable[..., Future[Any]],
) -> None:
    """CAR-10 as changed: the last one counts."""
    send(1)
    claimed()
    first = Holder(together, uncommitted(2, "requeue"))
    second = together(send, 3, "requeue")
    waits_for_a_lock()
    first.end()
    assert second.result(PATIENCE).outcome == "requeued"
    assert UniqueKey.objects.get(put_aside__isnull=False).put_aside["payload"] == 3


def test_busy_when_it_waits_for_too_long(
    together: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded, with advice; the caller's transaction stays usable, and its own limit is back."""
    monkeypatch.setattr(deduping, "PATIENCE", 0.0)
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


def test_calls_take_their_ids_in_one_order(together: Callable[..., Future[Any]]) -> None:
    """Two calls with the same ids the other way round: one waits, none dies."""
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


# A claim comes between


def claimed() -> QueuedMessage:
    """Claim the only message, as another worker does."""
    with second_connection() as other:
        other.execute(CLAIM)
    return QueuedMessage.objects.get()


CLAIM = (
    "update django_mq_queuedmessage set attempts = attempts + 1, claimed_by = 'worker:1',"
    " leased_until = now() + interval '1 minute'"
)


def test_an_update_loses_against_a_claim_that_is_not_committed(
    together: Callable[..., Future[Any]],
) -> None:
    """The row's lock tells, and is not waited for; after the commit the row is in flight."""
    send(1)
    with second_connection() as other:
        with other.transaction():
            other.execute(CLAIM)
            update = together(send, 2, "update")
            looked_twice(update)
        assert update.result(PATIENCE).copies[0].reason == "in_flight"
    assert QueuedMessage.objects.get().payload == 1


def test_an_update_wins_against_a_claim_that_is_rolled_back(
    together: Callable[..., Future[Any]],
) -> None:
    send(1)
    with second_connection() as other:
        with other.transaction(force_rollback=True):
            other.execute(CLAIM)
            update = together(send, 2, "update")
            looked_twice(update)
        assert update.result(PATIENCE).outcome == "updated"


def looked_twice(future: Future[Any]) -> None:
    """Return once a producer has met the locked row: it has drawn no answer from it."""
    with pytest.raises(TimeoutError):
        future.result(0.1)


def test_a_worker_that_ends_a_message_waits_for_no_producer(
    together: Callable[..., Future[Any]],
) -> None:
    """What is put aside in a transaction that is still open comes forward after its commit."""
    done = handled()
    send(1)
    message = claimed()
    producer = Holder(together, uncommitted(2, "requeue"))
    end_message(message)
    assert not QueuedMessage.objects.exists()
    with listening() as listener:
        assert producer.end().outcome == "requeued"
        assert listener.heard()
    assert QueuedMessage.objects.get().payload == 2
    assert UniqueKey.objects.get().message_id == QueuedMessage.objects.get().pk
    drain()
    assert done == [2]


def test_what_is_put_aside_while_the_message_ends_comes_forward(
    together: Callable[..., Future[Any]],
) -> None:
    """The producer commits first, but the worker has looked already: the hook waits for it."""
    send(1)
    message = claimed()
    producer = Holder(together, uncommitted(2, "requeue"))
    with second_connection() as worker, worker.transaction():
        end_message(message, worker.cursor())
        producer._end.set()
        waits_for_a_lock()
    assert producer.future.result(PATIENCE).outcome == "requeued"
    assert QueuedMessage.objects.get().payload == 2


def end_message(message: QueuedMessage, cursor: Any = None) -> None:
    from django_mq.store import free_unique_ids as freeing
    from django_mq.store.free_unique_ids import Done
    from django_mq.store.unique_ids import UniqueId

    with connection.cursor() as own:
        cursor = cursor or own
        cursor.execute("delete from django_mq_queuedmessage where id = %s", [message.pk])
        id = UniqueId(message.queue, message.handler, message.type, message.unique_id or "")
        freeing.end(cursor, [Done(message.pk, id, True)])


def handled() -> list[Any]:
    """Subscribe a handler; return the list of the payloads that it gets."""
    done: list[Any] = []

    @handler("a.b", name="a_b", queue="default")
    def function(delivery: Delivery) -> None:
        done.append(delivery.payload)

    return done


# Everything at once


class Settler(threading.Thread):
    """Claims, now and then fails, and settles, one message at a time: a worker's statements."""

    def __init__(self, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.stop = stop
        self.handled: list[int] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            with second_connection() as own:
                while not self.stop.is_set() or self.left(own):
                    self.step(own)
        except BaseException as error:
            self.errors.append(error)

    def left(self, own: psycopg.Connection[Any]) -> bool:
        [found] = own.execute(
            "select exists (select from django_mq_queuedmessage where dead_at is null)"
            " or exists (select from django_mq_uniquekey where put_aside is not null)"
        ).fetchone() or [False]
        return bool(found)

    def step(self, own: psycopg.Connection[Any]) -> None:
        from django_mq.store import free_unique_ids as freeing
        from django_mq.store import put_aside as aside
        from django_mq.store.free_unique_ids import Done
        from django_mq.store.unique_ids import UniqueId

        row = own.execute(
            "update django_mq_queuedmessage m set attempts = attempts + 1, claimed_by = 'w:1',"
            " leased_until = now() + interval '1 minute' from (select id from"
            " django_mq_queuedmessage where leased_until is null and dead_at is null"
            " and processable_after <= now() limit 1 for no key update skip locked) free"
            " where m.id = free.id"
            " returning m.id, m.queue, m.handler, m.type, m.unique_id, (m.payload->>'n')::int"
        ).fetchone()
        if row is None:
            if self.stop.is_set():  # as the chores do: whoever put it aside last rolled back
                freeing.come_forward(own.cursor(), aside.left_aside(own.cursor(), limit=10).left)
            own.execute("select pg_sleep(0.002)")
            return
        id, *unique, n = row
        with own.transaction(), own.cursor() as cursor:
            cursor.execute(
                "select from django_mq_queuedmessage where id = %s for no key update", [id]
            )
            end = self.random.choice(["ack", "ack", "die", "retry"])
            if end == "retry":
                cursor.execute(
                    "update django_mq_queuedmessage set leased_until = null, claimed_by = null"
                    " where id = %s",
                    [id],
                )
                return
            if end == "die":
                cursor.execute(
                    "update django_mq_queuedmessage set leased_until = null, claimed_by = null,"
                    " dead_at = now(), dead_reason = 'exhausted' where id = %s",
                    [id],
                )
            else:
                cursor.execute("delete from django_mq_queuedmessage where id = %s", [id])
            freeing.end(cursor, [Done(id, UniqueId._make(unique), end == "ack")])
        self.handled.append(n)


LIVE = """
select count(*) from (
    select from django_mq_queuedmessage where dead_at is null
     group by queue, handler, type, unique_id having count(*) > 1) twice
"""


def test_many_producers_of_the_same_ids(together: Callable[..., Future[Any]]) -> None:
    """Never two live rows of one id, no deadlock, and what was accepted is handled once.

    An update or a second requeue replaces what was accepted before it: so each id is handled as
    often as messages of it were added, or put aside first; and no number twice.
    """
    producers, calls, ids = 8, 25, ["a", "b", "c", "d"]
    stop, watching = threading.Event(), threading.Event()
    twice: list[int] = []

    def watch() -> None:
        with second_connection() as other:
            while not watching.is_set():
                twice.append((other.execute(LIVE).fetchone() or [0])[0])

    def produce(seed: int) -> list[tuple[int, str]]:
        chosen = random.Random(seed)
        told = []
        for call in range(calls):
            some = [chosen.choice(ids) for _ in range(chosen.randint(1, 4))]
            numbers = [(seed * calls + call) * 10 + place for place in range(len(some))]
            messages = [
                Message(
                    "a.b",
                    {"n": number},
                    unique_id=id,
                    on_duplicate=chosen.choice(["skip", "update", "debounce", "requeue"]),
                    unique_for=chosen.choice([None, 0.001]),
                )
                for number, id in zip(numbers, some, strict=True)
            ]
            with transaction.atomic():
                receipts = broadcast_many(messages)
                if chosen.random() < 0.2:
                    transaction.set_rollback(True)
                    continue
            told += list(zip(numbers, (each.outcome for each in receipts), strict=True))
        return told

    settlers = [Settler(seed, stop) for seed in range(3)]
    for settler in settlers:
        settler.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    futures = [together(produce, seed) for seed in range(producers)]
    told = dict(pair for future in futures for pair in future.result(PATIENCE))
    stop.set()
    for settler in settlers:
        settler.join(PATIENCE)
        assert not settler.is_alive(), [each.errors for each in settlers]
    watching.set()
    watcher.join(PATIENCE)
    assert [settler.errors for settler in settlers] == [[], [], []]
    assert twice
    assert not any(twice)
    counts = Counter(n for settler in settlers for n in settler.handled)
    assert set(counts.values()) == {1}
    accepted = {number for number, outcome in told.items() if outcome != "duplicate"}
    assert set(counts) <= accepted
    added = sum(outcome == "added" for outcome in told.values())
    asides = sum(outcome == "requeued" for outcome in told.values())
    assert added <= len(counts) <= added + asides
    assert not UniqueKey.objects.filter(message_id__isnull=False).exists()
    assert not UniqueKey.objects.filter(put_aside__isnull=False).exists()
