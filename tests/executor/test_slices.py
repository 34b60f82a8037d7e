"""Guarantee 1: the writes of handlers and their acks commit together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.postgres.functions import TransactionNow
from django.db import (
    connection,
    transaction,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.utils import timezone

from django_mq import RetryPolicy, broadcast, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage, WorkerHeartbeat
from django_mq.signals import message_acked, message_started
from testproject.shop.models import Product
from tests.rows import add, beat, stored
from tests.worker.conftest import (
    Bench,
    Said,
    add_many,
    attempts_of,
    effect,
    effects,
    ids,
    mostly_fresh,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_writes_broadcasts_and_acks_commit_together(bench: Bench) -> None:
    @handler("shop.orders.*", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        broadcast("shop.next", {"of": delivery.id}, queue="later")
        assert (effects(), waiting()) == (set(), ids(messages))  # seen by another session

    @handler("shop.next", queue="later", name="later")
    def later(delivery: Delivery) -> None: ...

    messages = add_many(3, handler="h")
    remainder = bench.run(bench.claim())
    assert (remainder.left, remainder.to_rerun) == ([], [])
    assert effects() == ids(messages)
    assert {m.payload["of"] for m in QueuedMessage.objects.filter(type="shop.next")} == ids(
        messages
    )
    assert not QueuedMessage.objects.filter(queue="mail").exists()
    assert bench.settled == [m.pk for m in messages]


def test_a_failure_takes_its_own_writes_and_broadcasts_alone(bench: Bench) -> None:
    """PMQ-36; PMQ-55, PMQ-58 as changed: its neighbours are acked. PMQ-46: at any failure."""

    @handler("shop.orders.*", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(7)))
    def h(delivery: Delivery) -> None:
        effect(delivery)
        broadcast("shop.next", queue="later")
        if delivery.payload == "raise":
            raise ValueError("no")
        if delivery.payload == "inner":
            with transaction.atomic():
                raise ValueError("no")
        if delivery.payload == "exit":
            raise SystemExit(3)
        if delivery.payload == "sql":
            connection.cursor().execute("select 1/0")

    @handler("shop.next", queue="later", name="later")
    def later(delivery: Delivery) -> None: ...

    failures = ["raise", "inner", "exit", "sql"]
    messages = [
        add(handler="h", payload=payload, after=-60 + n)
        for n, payload in enumerate(["a", *failures, "b"])
    ]
    bench.run_all(bench.claim())
    assert effects() == {messages[0].pk, messages[-1].pk}
    assert QueuedMessage.objects.filter(type="shop.next").count() == 2
    for failed in messages[1:-1]:
        stored(failed)
        assert (failed.attempts, failed.claimed_by, failed.leased_until) == (1, None, None)
        assert failed.last_error
        assert failed.processable_after > timezone.now() + timedelta(seconds=5)
        assert len(attempts_of(failed)) == 1


def test_the_attempt_that_failed_is_described(bench: Bench) -> None:
    """Guarantee 11, PMQ-66 as changed: including text that PostgreSQL refuses."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise ValueError("nul \x00 and \ud800 " + "x" * 100_000)

    message = add(handler="h")
    bench.run_all(bench.claim())
    (attempt,) = FailedAttempt.objects.all()
    assert (attempt.message_id, attempt.attempt, attempt.worker) == (message.pk, 1, "bench")
    assert (attempt.queue, attempt.type, attempt.handler) == ("mail", message.type, "h")
    assert attempt.error_class == "ValueError"
    assert "raise ValueError" in attempt.traceback
    assert attempt.started_at is not None
    assert attempt.started_at <= attempt.ended_at


def test_a_failed_handlers_write_through_an_old_cursor_is_undone(bench: Bench) -> None:
    """Guarantee 1: even if an earlier delivery made the cursor."""
    kept: list[Any] = []

    @handler("keep", queue="mail", name="keep")
    def keep(delivery: Any) -> None:
        kept.append(connection.cursor())

    @handler("write", queue="mail", name="write")
    def write(delivery: Any) -> None:
        kept[0].execute("insert into shop_product (name, price, stock) values ('undone', 1, 1)")
        raise ValueError

    add(handler="keep", type="keep", after=-2)
    add(handler="write", type="write", after=-1)
    bench.run_all(bench.claim())
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from shop_product where name = 'undone'")
        assert cursor.fetchone() == (0,)
    assert FailedAttempt.objects.get().error_class == "ValueError"


def test_batch_handlers_get_the_list_behind_one_savepoint(bench: Bench) -> None:
    """PMQ-20, PMQ-21: they succeed together."""
    calls: list[list[int]] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.id for each in deliveries])
        for each in deliveries:
            effect(each)

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert calls == [[m.pk for m in messages]]
    assert effects() == ids(messages)
    assert waiting() == set()


# ---- the limits of a slice


def test_a_slice_ends_when_its_time_is_over(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(slice_seconds=1e-9)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    messages = add_many(3, handler="h")
    remainder = bench.run(bench.claim())
    assert [task.delivery.id for task in remainder.left] == [m.pk for m in messages[1:]]
    assert waiting() == ids(messages[1:])


@mostly_fresh
def test_a_slice_has_fifty_savepoints_at_most(bench: Bench) -> None:
    """More savepoints would overflow into every other backend's snapshot."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "writes":
            effect(delivery)

    for n in range(53):
        add(handler="h", payload="reads nothing", after=-60 + n / 1000)
        add(handler="h", payload="writes", after=-60 + n / 1000)
    remainder = bench.run(bench.claim())
    assert len(remainder.left) == 6
    assert len(effects()) == 50


# ---- one message alone


def test_handler_may_deallocate_prepared_statements(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        connection.connection.execute("deallocate all")

    messages = [add(handler="h", after=-60 + n) for n in range(4)]
    for task in bench.claim():
        remainder = bench.run([task])
        assert (remainder.left, remainder.to_rerun) == ([], [])
    assert effects() == ids(messages)
    assert FailedAttempt.objects.count() == 0


def test_one_alone_that_is_not_ours_or_expired_does_not_run(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    gone, fine = add(handler="h"), add(handler="h")
    expired = add(handler="h", expires_at=timezone.now() + timedelta(minutes=1))
    tasks = {task.delivery.id: task for task in bench.claim()}
    QueuedMessage.objects.filter(pk=gone.pk).update(claimed_by="you:1")
    QueuedMessage.objects.filter(pk=expired.pk).update(expires_at=timezone.now())
    tasks[expired.pk].delivery._asked_at -= 60 * bench.fresh  # the claim's own answer then counts
    for message in (gone, expired, fine):
        bench.run([tasks[message.pk]])
    assert effects() == {fine.pk}
    assert stored(gone).claimed_by == "you:1"
    assert stored(expired).dead_reason == "expired"


# ---- signals


def test_signals_are_sent_once_and_robustly(bench: Bench, said: Said) -> None:
    """NSQ-33: after the commit that made them true, even when a receiver raises."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(9)))
    def h(delivery: Delivery) -> None:
        effect(delivery)
        if delivery.payload == "bad":
            raise ValueError("no")

    def rude(sender: str, **data: Any) -> None:
        raise RuntimeError

    good, bad = (add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad"]))
    message_started.connect(rude)
    try:
        bench.run_all(bench.claim())
    finally:
        message_started.disconnect(rude)
    assert [(name, subject.id) for name, subject, _ in said.all] == [
        ("message_started", good.pk),
        ("message_started", bad.pk),
        ("message_acked", good.pk),
        ("message_retried", bad.pk),
    ]
    data = said.all[-1][2]
    assert isinstance(data["error"], ValueError)
    assert data["after"] == 9.0
    assert data["duration"] >= 0


@pytest.mark.parametrize("error", [True, False], ids=["sql error", "write"])
def test_a_receiver_that_spoils_the_transaction_is_not_the_handlers_failure(
    bench: Bench, error: bool
) -> None:
    def rude(sender: str, **data: Any) -> None:
        Product.objects.create(name="of the receiver", price=1)
        if error:
            connection.cursor().execute("select 1/0")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    message = add(handler="h")
    message_started.connect(rude)
    try:
        bench.run_all(bench.claim())
    finally:
        message_started.disconnect(rude)
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0
    assert Product.objects.filter(name=f"message {message.pk}").exists()
    assert Product.objects.filter(name="of the receiver").exists() is not error


@mostly_fresh
@pytest.mark.parametrize(
    "do",
    [
        lambda: connection.set_autocommit(False),
        lambda: transaction.atomic().__enter__(),
        lambda: connection.cursor().execute("begin"),
        lambda: connection.connection.close(),
    ],
    ids=["autocommit", "atomic", "begin", "driver close"],
)
def test_a_transaction_left_open_by_a_receiver_does_not_swallow_the_next_slice(
    bench: Bench, do: Callable[[], Any]
) -> None:
    """Receivers of message_acked run after the commit, on the same connection."""

    def rude(sender: str, **data: Any) -> None:
        do()

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    messages = [add(handler="h", after=-60 + n) for n in range(2)]
    message_acked.connect(rude)
    try:
        for task in bench.claim():
            assert bench.run([task]).left == []
    finally:
        message_acked.disconnect(rude)
    assert effects() == ids(messages)
    assert waiting() == set()


def test_no_log_line_holds_a_payload(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "django_mq")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.attempt % 2:
            raise ValueError("no")

    add(handler="h", payload={"password": "sesame"}, metadata={"token": "sesame"})
    bench.run_all(bench.claim())
    assert caplog.records
    assert "sesame" not in caplog.text
    assert not any("sesame" in str(record.__dict__) for record in caplog.records)


def test_scoreboard_shows_running_messages(bench: Bench) -> None:
    seen: list[list[int]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(bench.scoreboard.running())
        raise ValueError

    messages = add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert seen == [[m.pk] for m in messages]
    assert bench.scoreboard.running() == []


def test_transaction_time_is_constant_within_a_slice(bench: Bench) -> None:
    """docs/guarantees.md: the time of the transaction, but not that of a statement."""
    seen: list[tuple[object, ...]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        expressions = {"django": Now(), "transaction": TransactionNow()}
        seen.append(
            WorkerHeartbeat.objects.annotate(
                **expressions,
                sql=RawSQL("now()", []),
                current=RawSQL("current_timestamp", []),
                clock=RawSQL("clock_timestamp()", []),
            ).values_list("django", "transaction", "sql", "current", "clock")[0]
        )

    beat("worker")
    add_many(2, handler="h")
    bench.run_all(bench.claim())
    django, transaction, sql, current, clock = zip(*seen, strict=True)
    assert transaction == sql == current
    assert [len(set(each)) for each in (django, transaction, clock)] == [2, 1, 2]
