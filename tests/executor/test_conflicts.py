"""Victims of other transactions and of a lost database run again, uncharged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import (
    DatabaseError,
    connection,
    transaction,
)
from django.utils import timezone

from django_mq import Reject, Retry, Snooze, handler
from django_mq.executor import slice_state
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from testproject.shop.models import Product
from tests.database import second_connection, until_blocked
from tests.rows import add, stored
from tests.worker.conftest import (
    Bench,
    add_many,
    attempts_of,
    effect,
    effects,
    ids,
    locked_first,
    mostly_fresh,
    waiting,
)
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

# ---- victims of others


def test_deadlock_victims_run_again_alone_uncharged(bench: Bench) -> None:
    """A real deadlock, with another session that waits for a lock of the slice."""
    first, second = (Product.objects.create(name=f"stock {n}", price=1) for n in (1, 2))
    lock = "select from shop_product where id = %s for update"
    attempts: list[tuple[str, int]] = []
    with second_connection() as other:
        other.execute("set deadlock_timeout = '60s'")  # the slice is the victim
        other.autocommit = False
        other.execute(lock, [second.pk])
        blocked = threading.Thread(target=lambda: other.execute(lock, [first.pk]), daemon=True)

        @handler("#", queue="mail", name="h")
        def h(delivery: Delivery) -> None:
            attempts.append((delivery.payload, delivery.attempt))
            effect(delivery)
            if delivery.payload == "victim" and not blocked.ident:
                Product.objects.select_for_update().get(pk=first.pk)
                blocked.start()
                until_blocked(other.info.backend_pid)
                connection.cursor().execute("set local deadlock_timeout = '10ms'")
                Product.objects.select_for_update().get(pk=second.pk)

        messages = [
            add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "victim", "b"])
        ]
        tasks = bench.claim()
        remainder = bench.run(tasks)
        # Its neighbour is done, it runs again alone, and the unstarted one did not run.
        assert [task.delivery.id for task in remainder.to_rerun] == [messages[1].pk]
        assert [task.delivery.id for task in remainder.left] == [messages[2].pk]
        blocked.join(30)
        other.rollback()
        bench.run_all(remainder.to_rerun)
        bench.run_all(remainder.left)
    assert attempts == [("a", 1), ("victim", 1), ("victim", 1), ("b", 1)]
    assert ids(messages) <= {
        int(p.name.split()[1]) for p in Product.objects.filter(name__startswith="message")
    }
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


def conflict(sqlstate: str = "40001") -> None:
    connection.cursor().execute(
        f"do $$ begin raise exception 'in the way' using errcode = '{sqlstate}'; end $$"
    )


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "55P03"])
def test_conflicts_are_counted_and_at_last_charged(
    bench: Bench, sqlstate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_state, "MAX_CONFLICTS", 3)
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.attempt)
        conflict(sqlstate)

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert ran == [1, 1, 1, 1]
    assert stored(message).attempts == 1
    assert attempts_of(message) == ["django.db.utils.OperationalError"]
    assert not bench.slices._conflicts._counts


@pytest.mark.parametrize(
    ("says", "attempts"), [(Retry(50), 1), (Snooze(50), 0), (Reject("no"), 1)], ids=repr
)
def test_a_handler_may_decide_about_a_conflict(
    bench: Bench, says: Exception, attempts: int
) -> None:
    """`select_for_update(nowait=True)`: if another session has the row, try again later."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        try:
            with transaction.atomic():
                conflict("55P03")
        except DatabaseError as error:
            raise says from error

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert len(ran) == 1
    assert stored(message).attempts == attempts
    assert message.dead_at is not None or message.processable_after > timezone.now()


LEVELS = [
    psycopg.IsolationLevel.READ_COMMITTED,
    psycopg.IsolationLevel.REPEATABLE_READ,
    psycopg.IsolationLevel.SERIALIZABLE,
]


@contextmanager
def isolation(bench: Bench, level: psycopg.IsolationLevel) -> Iterator[None]:
    bench.wrapper.settings_dict["OPTIONS"]["isolation_level"] = level
    bench.session.close()
    yield


@mostly_fresh
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_works_at_every_isolation_level(bench: Bench, level: psycopg.IsolationLevel) -> None:
    """Guarantee 17: the loser of a conflict runs again, uncharged."""
    shelf = Product.objects.create(name="shelf", price=1, stock=0)
    seen: list[str] = []
    lose = True

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        nonlocal lose
        with connection.cursor() as cursor:
            cursor.execute("show transaction_isolation")
            seen.append(cursor.fetchone()[0])
        effect(delivery)
        stock = Product.objects.get(pk=shelf.pk).stock
        if lose:
            lose = False
            with second_connection() as other:
                other.execute(
                    "update shop_product set stock = stock + 10 where id = %s", [shelf.pk]
                )
        Product.objects.filter(pk=shelf.pk).update(stock=stock + 1)

    messages = [add(handler="h", payload=n, after=-60 + n) for n in range(3)]
    with isolation(bench, level):
        bench.run_all(bench.claim())
    assert set(seen) == {level.name.lower().replace("_", " ")}
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0
    assert Product.objects.filter(name__startswith="message").count() == len(messages)
    if level is not psycopg.IsolationLevel.READ_COMMITTED:
        assert Product.objects.get(pk=shelf.pk).stock == 13


def test_a_commit_that_cannot_be_serialized_runs_again_uncharged(bench: Bench) -> None:
    """Write skew is found at COMMIT: the slice runs again one by one."""
    one, two = (Product.objects.create(name=f"shelf {n}", price=1, stock=1) for n in (1, 2))
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.attempt)
        effect(delivery)
        if len(ran) == 2:
            # Each reads rows that the other writes.
            Product.objects.get(pk=two.pk)
            Product.objects.filter(pk=one.pk).update(stock=0)
            with second_connection() as other:
                other.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                with other.transaction():
                    other.execute("select stock from shop_product where id = %s", [one.pk])
                    other.execute("update shop_product set stock = 0 where id = %s", [two.pk])

    messages = add_many(2, handler="h")
    with isolation(bench, psycopg.IsolationLevel.SERIALIZABLE):
        bench.run_all(bench.claim())
    assert len(ran) > 2
    assert set(ran) == {1}
    assert ids(messages) == {
        int(p.name.split()[1]) for p in Product.objects.filter(name__startswith="message")
    }
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


# ---- the database goes away


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("arrives", [True, False], ids=["committed", "not committed"])
def test_commit_without_an_answer(
    make_bench: Callable[..., Bench], proxy: Proxy, arrives: bool, count: int
) -> None:
    """Guarantee 1: the server's word on the transaction decides; nothing is charged."""
    bench = make_bench(port=proxy.port)
    attempts: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        effect(delivery)
        transaction.on_commit(lambda: hooks.append(delivery.id))

    messages = add_many(count, handler="h")
    tasks = bench.claim()
    proxy.cut_at("COMMIT", arrives=arrives)
    bench.run_all(tasks)
    assert proxy.cuts == 1
    assert effects() == ids(messages)
    assert waiting() == set()
    assert attempts == [1] * (count if arrives else 2 * count)
    assert sorted(hooks) == sorted(ids(messages))
    assert sorted(bench.settled) == sorted(ids(messages))
    assert FailedAttempt.objects.count() == 0


@mostly_fresh
@pytest.mark.parametrize("word", ["for no key update skip locked", "delete from django_mq"])
@pytest.mark.parametrize("arrives", [True, False])
def test_cut_at_our_own_statements_charges_no_message(
    make_bench: Callable[..., Bench], proxy: Proxy, word: str, arrives: bool
) -> None:
    bench = make_bench(port=proxy.port)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    proxy.cut_at(word, arrives=arrives)
    bench.run_all(tasks)
    assert proxy.cuts == 1
    assert effects() == ids(messages)
    assert waiting() == set()
    assert FailedAttempt.objects.count() == 0


def test_killed_while_a_handler_runs_that_touches_nothing_more(bench: Bench) -> None:
    """Nothing was written: all run again, and none is charged."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        if len(ran) == 2:
            with second_connection() as other:
                pid = bench.wrapper.__dict__["connection"].info.backend_pid
                other.execute("select pg_terminate_backend(%s, 5000)", [pid])

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert waiting() == set()
    assert set(ran) == ids(messages)
    assert FailedAttempt.objects.count() == 0


def test_refused_write_of_a_failure_stops_no_other_message(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 11: the attempt counts anyway (the lease lapses), and others continue.

    PMQ-56 as changed.
    """

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "bad":
            raise ValueError
        effect(delivery)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad", "b"])]
    with second_connection() as other:
        other.execute(
            "create function mq_refuse() returns trigger language plpgsql as"
            " $$ begin raise exception 'refused'; end $$;"
            "create trigger mq_refuse before insert on django_mq_failedattempt"
            f" for each row when (new.message_id = {messages[1].pk}) execute function mq_refuse()"
        )
        try:
            bench.run_all(bench.claim())
        finally:
            other.execute("drop function mq_refuse cascade")
    assert effects() == {messages[0].pk, messages[2].pk}
    assert waiting() == {messages[1].pk}
    assert stored(messages[1]).attempts == 1
    assert sorted(bench.settled) == sorted(ids(messages))
    (said,) = [r for r in caplog.records if getattr(r, "event", "") == "settle_refused"]
    assert said.getMessage().endswith("; its lease lapses, and the attempt counts")


@locked_first
def test_a_handler_that_always_loses_its_connection_is_charged(bench: Bench) -> None:
    """Guarantee 3: the server may be at fault sometimes, but not every time."""
    runs: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        runs.append(delivery.attempt)
        pid = bench.wrapper.__dict__["connection"].info.backend_pid
        with second_connection() as other:
            other.execute("select pg_terminate_backend(%s, 5000)", [pid])

    message = add(handler="h")
    tasks = bench.claim()
    for _ in range(10):
        if not tasks:
            break
        remainder = bench.slices.run(tasks)
        tasks = [*remainder.to_rerun, *remainder.left]
    message.refresh_from_db()
    assert (message.attempts, message.leased_until) == (1, None)
    assert FailedAttempt.objects.count() == 1
    assert 1 < len(runs) < 10
    assert not bench.slices._conflicts._losses  # its next attempt starts over
