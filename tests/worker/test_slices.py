"""Guarantees 1 and 2: handlers' writes and acks commit together, whatever a handler does."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.backends.signals import connection_created
from django.dispatch import Signal
from django.utils import timezone, translation

from django_mq import Reject, Retry, RetryPolicy, Snooze, broadcast, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.signals import message_acked, message_dead, message_retried, message_started
from django_mq.store import settle
from django_mq.worker import locking, progress
from django_mq.worker import slices as slices_module
from django_mq.worker.shut import Shut
from testproject.shop.models import Product
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import (
    Bench,
    Everybody,
    Said,
    add_many,
    attempts_of,
    effect,
    effects,
    waiting,
)
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

#: These are about several that write in one slice.
behind_a_lock = pytest.mark.parametrize("make_bench", ["locked-first", "young"], indirect=True)

BROKE = "django_mq.exceptions.HandlerBrokeTransaction"


def ids(messages: list[QueuedMessage]) -> set[int]:
    return {message.pk for message in messages}


# ---- guarantee 1: together or not at all


@behind_a_lock
def test_writes_broadcasts_and_acks_commit_together(bench: Bench) -> None:
    @handler("shop.orders.*", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        broadcast("shop.next", {"of": delivery.id}, queue="later")
        assert (effects(), waiting()) == (set(), ids(messages))  # seen from outside

    @handler("shop.next", queue="later", name="later")
    def later(delivery: Delivery) -> None: ...

    messages = add_many(3, handler="h")
    remainder = bench.run(bench.claim())
    assert (remainder.left, remainder.again) == ([], [])
    assert effects() == ids(messages)
    assert {m.payload["of"] for m in QueuedMessage.objects.filter(type="shop.next")} == ids(
        messages
    )
    assert not QueuedMessage.objects.filter(queue="mail").exists()
    assert bench.settled == [m.pk for m in messages]


def test_a_failure_takes_its_own_writes_and_broadcasts_alone(bench: Bench) -> None:
    """PMQ-36; PMQ-55, PMQ-58 as changed: its neighbours are acked. PMQ-46: however it fails."""

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
    """Guarantee 11, PMQ-66 as changed: also text that PostgreSQL refuses."""

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


# ---- guarantee 2: what a handler may do to the transaction


def swallow_error(delivery: Delivery) -> None:
    with pytest.raises(DatabaseError):
        connection.cursor().execute("select 1/0")


def swallow_integrity_error(delivery: Delivery) -> None:
    Product.objects.create(name="twice", price=1)
    with pytest.raises(IntegrityError):
        Product.objects.create(name="twice", price=1)


def raw(*statements: str) -> Callable[[Delivery], None]:
    def do(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    do.__name__ = "; ".join(statements)
    return do


def close(delivery: Delivery) -> None:
    connection.close()


def close_and_go_on(delivery: Delivery) -> None:
    connection.close()
    with pytest.raises((DatabaseError, psycopg.Error)):
        connection.cursor()


def set_rollback(delivery: Delivery) -> None:
    transaction.set_rollback(True)


def flip_autocommit(delivery: Delivery) -> None:
    connection.cursor().execute("commit")
    connection.connection.autocommit = True


def driver_commit(delivery: Delivery) -> None:
    connection.connection.commit()


def driver_rollback(delivery: Delivery) -> None:
    connection.connection.rollback()


def driver_close(delivery: Delivery) -> None:
    connection.connection.close()


def inner_block_left_open(delivery: Delivery) -> None:
    transaction.atomic().__enter__()


def inner_block_without_savepoint_left_open(delivery: Delivery) -> None:
    transaction.atomic(savepoint=False).__enter__()


def outer_block_left_is_a_commit(delivery: Delivery) -> None:
    connection.atomic_blocks[0].__exit__(None, None, None)


def terminate(delivery: Delivery) -> None:
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid]
        )


def terminate_and_use(delivery: Delivery) -> None:
    terminate(delivery)
    connection.cursor().execute("select 1")


BREAKS = [
    swallow_error,
    swallow_integrity_error,
    raw("commit"),
    raw("commit", "select 1"),
    raw("commit", "begin"),
    raw("commit and chain"),
    raw("rollback"),
    raw("rollback", "select 1"),
    raw("rollback", "begin", "select 1"),
    raw("release savepoint django_mq_delivery"),
    close,
    close_and_go_on,
    set_rollback,
    flip_autocommit,
    driver_commit,
    driver_rollback,
    driver_close,
    inner_block_left_open,
    inner_block_without_savepoint_left_open,
    outer_block_left_is_a_commit,
    terminate,
    terminate_and_use,
]


@pytest.mark.parametrize("first", [False, True], ids=["after effect", "first thing"])
@pytest.mark.parametrize("do", BREAKS, ids=lambda each: each.__name__)
def test_whatever_ends_or_spoils_the_transaction_is_the_culprits_failure(
    bench: Bench, do: Callable[[Delivery], None], first: bool
) -> None:
    """Guarantee 2: neighbours before and behind it in the slice run once and are acked."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        bad = delivery.payload == "bad"
        if bad and first:
            do(delivery)
            return
        effect(delivery)
        if bad:
            do(delivery)

    messages = [
        add(handler="h", payload=payload, after=-60 + n)
        for n, payload in enumerate(["a", "b", "bad", "c", "d"])
    ]
    bad = messages[2]
    bench.run_all(bench.claim())
    # What the culprit committed itself stays, and is run again: that it was told.
    assert effects() - {bad.pk} == ids(messages) - {bad.pk}
    assert waiting() == {bad.pk}
    stored(bad)
    assert (bad.attempts, bad.claimed_by) == (1, None)
    assert len(attempts_of(bad)) == 1
    assert FailedAttempt.objects.count() == 1
    assert ran.count(bad.pk) == 1
    assert sorted(bench.settled) == sorted(ids(messages))
    # The next message starts on a clean connection.
    after = add(handler="h", payload="e")
    bench.run_all(bench.claim())
    assert after.pk in effects()
    assert after.pk not in waiting()


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (swallow_error, "swallowed a database error"),
        (set_rollback, "marked its transaction for rollback"),
        (raw("commit"), "ended its transaction"),
        (close, "connection was closed"),
        (inner_block_left_open, "left an atomic"),
    ],
)
def test_the_culprit_is_told_what_it_did(
    bench: Bench, do: Callable[[Delivery], None], words: str
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        do(delivery)

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert attempts_of(message) == [BROKE]
    assert words in stored(message).last_error


@pytest.mark.parametrize(
    "do", [do for do in BREAKS if "commit" not in do.__name__], ids=lambda each: each.__name__
)
def test_what_the_culprit_wrote_is_undone(bench: Bench, do: Callable[[Delivery], None]) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        do(delivery)

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert effects() == set()
    assert waiting() == {message.pk}


@pytest.mark.parametrize(
    "do",
    [raw("commit"), driver_commit, flip_autocommit],
    ids=["raw", "driver", "autocommit"],
)
def test_what_a_raw_commit_kept_of_neighbours_is_not_run_again(
    bench: Bench, do: Callable[[Delivery], None]
) -> None:
    ran: list[str] = []
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)
        effect(delivery)
        transaction.on_commit(lambda: hooks.append(delivery.payload))
        if delivery.payload == "bad":
            do(delivery)
        if delivery.payload == "fails":
            raise ValueError

    messages = [
        add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "fails", "bad", "b"])
    ]
    bench.run_all(bench.claim())
    assert ran == ["a", "fails", "bad", "b"]
    assert hooks == ["a", "b"]
    assert waiting() == {messages[1].pk, messages[2].pk}
    assert attempts_of(messages[1]) == ["ValueError"]
    assert attempts_of(messages[2]) == [BROKE]


@behind_a_lock
def test_a_raw_rollback_runs_neighbours_again_uncharged(bench: Bench) -> None:
    attempts: list[tuple[str, int]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        attempts.append((delivery.payload, delivery.attempt))
        effect(delivery)
        if delivery.payload == "bad":
            connection.cursor().execute("rollback")

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad"])]
    bench.run_all(bench.claim())
    assert attempts == [("a", 1), ("bad", 1), ("a", 1)]
    assert effects() == {messages[0].pk}


def test_a_handler_may_use_savepoints_of_its_own(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        with pytest.raises(IntegrityError), transaction.atomic():
            effect(delivery)
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            Product.objects.create(name="undone 1", price=1)
            1 / 0  # noqa: B018
        sid = transaction.savepoint()
        Product.objects.create(name="undone 2", price=1)
        transaction.savepoint_rollback(sid)
        connection.cursor().execute("savepoint mine; rollback to mine; release mine")

    messages = add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert effects() == ids(messages)
    assert waiting() == set()


def test_durable_blocks_are_refused_inside(bench: Bench) -> None:
    """Not promised, and said so: section 11 of the design."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with transaction.atomic(durable=True):
            pass

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert attempts_of(message) == ["RuntimeError"]


@pytest.fixture
def family(transactional_db: None) -> Iterator[Callable[[Delivery], None]]:
    """Returns what writes a child without a parent: its foreign key is checked at COMMIT."""
    with second_connection() as other:
        other.execute(
            "create table worker_parent (id bigint primary key);"
            "create table worker_child (parent bigint references worker_parent"
            " deferrable initially deferred)"
        )

        def write_child(delivery: Delivery) -> None:
            connection.cursor().execute("insert into worker_child values (%s)", [delivery.id])

        yield write_child
        other.execute("drop table worker_child, worker_parent")


@behind_a_lock
def test_a_deferred_violation_is_blamed_on_the_right_message(
    bench: Bench, family: Callable[[Delivery], None]
) -> None:
    """A Django foreign key is checked at COMMIT, and would take the whole slice along."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        if delivery.payload == "bad":
            family(delivery)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad", "b"])]
    bench.run_all(bench.claim())
    assert effects() == {messages[0].pk, messages[2].pk}
    assert waiting() == {messages[1].pk}
    assert attempts_of(messages[1]) == ["django.db.utils.IntegrityError"]
    assert bench.runs == [[m.pk for m in messages]]  # found without running anything twice


def test_constraints_are_deferred_again_for_the_next_message(
    bench: Bench, family: Callable[[Delivery], None]
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        family(delivery)
        connection.cursor().execute("insert into worker_parent values (%s)", [delivery.id])

    messages = add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert effects() == ids(messages)


@pytest.fixture
def immediate() -> Iterator[str]:
    """A table whose unique constraint is deferrable, and checked at once unless told otherwise."""
    with second_connection() as other:
        other.execute(
            "create table worker_immediate"
            " (n int, constraint worker_immediate_n unique (n) deferrable initially immediate)"
        )
        yield "worker_immediate"
        other.execute("drop table worker_immediate")


def test_constraints_that_are_initially_immediate_stay_so(bench: Bench, immediate: str) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"insert into {immediate} values (%s)", [delivery.id])
            with pytest.raises(IntegrityError), transaction.atomic():
                cursor.execute(f"insert into {immediate} values (%s)", [delivery.id])

    add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert waiting() == set()


def test_a_constraint_that_goes_away_meanwhile_is_nobodys_failure(
    bench: Bench, immediate: str
) -> None:
    """A migration dropped it while this worker's connection remembers it."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    first = add(handler="h")
    bench.run_all(bench.claim())
    with second_connection() as other:
        other.execute(f"alter table {immediate} drop constraint worker_immediate_n")
    second = add(handler="h")
    bench.run_all(bench.claim())
    assert effects() == {first.pk, second.pk}
    assert FailedAttempt.objects.count() == 0


def test_a_violation_that_only_commit_finds_is_blamed_on_the_right_message(
    bench: Bench, family: Callable[[Delivery], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMMIT fails all the same: the slice runs again one by one, nothing is charged twice."""
    monkeypatch.setattr(
        bench.slices._session.savepoint,
        "_closing_statements",
        lambda *args: psycopg.sql.SQL("release savepoint django_mq_delivery"),
    )

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        if delivery.payload == "bad":
            family(delivery)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad", "b"])]
    bench.run_all(bench.claim())
    assert effects() == {messages[0].pk, messages[2].pk}
    assert attempts_of(messages[1]) == ["django.db.utils.IntegrityError"]
    assert FailedAttempt.objects.count() == 1
    assert stored(messages[1]).attempts == 1


# ---- between deliveries


SESSION = [
    "set statement_timeout = '7s'",
    "set search_path = pg_catalog",
    "set time zone 'Asia/Tokyo'",
    "set my.tenant = 'other'",
    "set local statement_timeout = '7s'",
    "set local lock_timeout = '7s'",
    "set role mq_other",
    "set local role mq_other",
    "set session authorization mq_other",
]
SHOW = (
    "select current_setting('statement_timeout'), current_setting('search_path'),"
    " current_setting('timezone'), coalesce(current_setting('my.tenant', true), ''),"
    " current_setting('lock_timeout'), current_user, session_user"
)


@pytest.fixture
def other_role(transactional_db: None) -> Iterator[None]:
    with second_connection() as other:
        other.execute(
            "do $$ begin create role mq_other; exception when duplicate_object then end $$"
        )
        other.execute("grant all on all tables in schema public to mq_other")
        yield
        other.execute("drop owned by mq_other; drop role mq_other")


@pytest.mark.parametrize("fails", [False, True], ids=["acked", "failed"])
@pytest.mark.parametrize("statement", SESSION)
def test_session_settings_are_taken_back(
    bench: Bench, statement: str, fails: bool, other_role: None
) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(SHOW)
            seen.append(cursor.fetchone())
            cursor.execute(statement)
        if fails:
            raise ValueError

    for _ in range(2):
        add_many(2, handler="h")
        bench.run_all(bench.claim())
    assert len(seen) == 4
    # A message that is alone in its slice waits for locks as long as it likes.
    assert {each[4] for each in seen} <= ({"0", "30s"} if bench.aloof else {"30s"})
    assert len({(*each[:4], *each[5:]) for each in seen}) == 1


def test_the_servers_limits_hold_for_each_handler_of_the_slice(bench: Bench) -> None:
    """Slices limit how long the server waits for us: guarantee 6."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", timeout=100)
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "select current_setting('idle_in_transaction_session_timeout'),"
                " current_setting('client_connection_check_interval')"
            )
            seen.append(cursor.fetchone())

    add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert seen == [("130s", "500ms")] * 3


def test_a_very_long_timeout_is_no_error(bench: Bench) -> None:
    """The server's limit ends at 2**31 milliseconds, 24 days."""

    @handler("#", queue="mail", name="h", timeout=timedelta(days=60))
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    bench.run_all(bench.claim())
    assert waiting() == set()


def test_translation_time_zone_and_context_end_with_the_handler(bench: Bench) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append((translation.get_language(), timezone.get_current_timezone_name()))
        translation.activate("fr")
        timezone.activate("Asia/Tokyo")

    add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert seen[0] == seen[1]


# ---- on_commit


def test_hooks_run_once_after_commit_and_not_for_a_failure(bench: Bench) -> None:
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        def hook() -> None:
            assert delivery.id not in waiting()
            hooks.append(delivery.payload)

        transaction.on_commit(hook)
        with transaction.atomic():
            transaction.on_commit(lambda: hooks.append(delivery.payload + " inner"))
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            transaction.on_commit(lambda: hooks.append("never"))
            1 / 0  # noqa: B018
        if delivery.payload == "bad":
            raise ValueError

    for n, payload in enumerate(["a", "bad", "b"]):
        add(handler="h", payload=payload, after=-60 + n)
    bench.run_all(bench.claim())
    assert hooks == ["a", "a inner", "b", "b inner"]
    assert bench.wrapper.run_on_commit == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_hook_that_raises_unacks_nothing(
    bench: Bench, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        def hook() -> None:
            hooks.append(delivery.payload)
            raise error

        transaction.on_commit(hook)

    for n, payload in enumerate(["a", "b"]):
        add(handler="h", payload=payload, after=-60 + n)
    bench.run_all(bench.claim())
    assert hooks == ["a", "b"]
    assert waiting() == set()
    assert [r.event for r in caplog.records if hasattr(r, "event")].count("hook_failed") == 2


@pytest.mark.parametrize(
    "do",
    [
        lambda: connection.set_autocommit(False),
        lambda: transaction.atomic().__enter__(),
        lambda: connection.close(),
        lambda: connection.connection.close(),
        lambda: connection.cursor().execute("begin"),
        lambda: connection.cursor().execute("set statement_timeout = '7s'"),
    ],
    ids=["autocommit", "atomic", "close", "driver close", "begin", "set"],
)
def test_what_a_hook_does_to_the_connection_does_not_reach_the_next_slice(
    bench: Bench, do: Callable[[], Any]
) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        with connection.cursor() as cursor:
            cursor.execute(SHOW)
            seen.append(cursor.fetchone())
        transaction.on_commit(do)

    first = add(handler="h")
    bench.run_all(bench.claim())
    second = add(handler="h")
    bench.run_all(bench.claim())
    assert effects() == {first.pk, second.pk}
    assert waiting() == set()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("keeps", ["driver", "nothing"])
def test_a_hook_on_a_connection_that_was_made_meanwhile(bench: Bench, keeps: str) -> None:
    """One handler commits by itself, and so the hooks of the one before it run on another one."""
    made: list[Any] = []
    seen: list[str] = []

    def keep(connection: Any, **_: Any) -> None:
        made.append(connection.connection)

    def hook() -> None:
        driver = made[-1] if keeps == "driver" else connection.connection
        driver.execute("set statement_timeout = '7s'")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "hooks":
            effect(delivery)
            transaction.on_commit(hook)
        elif delivery.payload == "commits":
            connection.connection.commit()
        else:
            seen.append(connection.cursor().execute("show statement_timeout").fetchone()[0])

    connection_created.connect(keep)
    try:
        for n, payload in enumerate(["hooks", "commits", "looks"]):
            add(handler="h", payload=payload, after=-60 + n)
        bench.run_all(bench.claim(limit=2))
        bench.run_all(bench.claim())
    finally:
        connection_created.disconnect(keep)
    assert made
    assert seen == ["0"]


@pytest.mark.parametrize("signal", [message_acked, message_dead, message_retried])
def test_what_a_receiver_sets_does_not_reach_the_next_slice(bench: Bench, signal: Signal) -> None:
    """Nor where the transaction is gone, and what was told of is settled in another one."""
    seen: list[str] = []

    def told(**_: Any) -> None:
        seen.append("told")
        connection.cursor().execute("set statement_timeout = '7s'")

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(connection.cursor().execute("show statement_timeout").fetchone()[0])
        if signal is not message_acked:
            connection.connection.rollback()

    signal.connect(told)
    try:
        for _ in range(2):
            add(handler="h", max_attempts=1 if signal is message_dead else 5)
            bench.run_all(bench.claim())
    finally:
        signal.disconnect(told)
    assert seen == ["0", "told"] * 2


# ---- victims of others


@behind_a_lock
def test_deadlock_victims_run_again_alone_uncharged(bench: Bench) -> None:
    """A real deadlock, with another session that waits for what the slice has locked."""
    first, second = (Product.objects.create(name=f"stock {n}", price=1) for n in (1, 2))
    lock = "select from shop_product where id = %s for update"
    attempts: list[tuple[str, int]] = []
    with second_connection() as other, second_connection() as watcher:
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
                pid = other.info.backend_pid
                while not watcher.execute("select pg_blocking_pids(%s)", [pid]).fetchone()[0]:
                    pass
                connection.cursor().execute("set local deadlock_timeout = '10ms'")
                Product.objects.select_for_update().get(pk=second.pk)

        messages = [
            add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "victim", "b"])
        ]
        tasks = bench.claim()
        remainder = bench.run(tasks)
        # Its neighbour is done; itself it runs again, alone; what had not started did not.
        assert [task.delivery.id for task in remainder.again] == [messages[1].pk]
        assert [task.delivery.id for task in remainder.left] == [messages[2].pk]
        blocked.join(30)
        other.rollback()
        bench.run_all(remainder.again)
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
    monkeypatch.setattr(progress, "MOST_CONFLICTS", 3)
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
def test_what_a_handler_says_about_a_conflict_counts(
    bench: Bench, says: Exception, attempts: int
) -> None:
    """`select_for_update(nowait=True)` and, if somebody has it: not now."""
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
    bench.slices._session.reset()
    yield


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_works_at_every_isolation_level(bench: Bench, level: psycopg.IsolationLevel) -> None:
    """Guarantee 17: one who loses against another transaction runs again, uncharged."""
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
            # Each reads what the other writes.
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


# ---- the fence


def take_over(id: int) -> None:
    """As if the lease had lapsed and another worker had claimed it."""
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set claimed_by = 'other:1', attempts = attempts + 1"
            " where id = %s",
            [id],
        )


def test_a_message_taken_before_the_slice_does_not_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 4."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        effect(delivery)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    take_over(messages[1].pk)
    bench.run_all(tasks)
    assert ran == [messages[0].pk, messages[2].pk]
    assert waiting() == {messages[1].pk}
    assert stored(messages[1]).claimed_by == "other:1"
    assert [r.event for r in caplog.records if hasattr(r, "event")] == ["lease_lost"]
    assert sorted(bench.settled) == sorted(ids(messages))


@pytest.mark.parametrize("how", ["deleted", "taken"])
@pytest.mark.parametrize("fails", [False, True], ids=["acks", "fails"])
def test_lease_lost_while_it_runs_takes_the_writes_along(
    bench: Bench, how: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock prevents it, except from a handler that gave the locks away, or from within."""
    ran: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)
        effect(delivery)
        if delivery.payload != "lost":
            return
        with connection.cursor() as cursor:
            if how == "deleted":
                cursor.execute("delete from django_mq_queuedmessage where id = %s", [delivery.id])
            else:
                cursor.execute(
                    "update django_mq_queuedmessage set claimed_by = 'other:1' where id = %s",
                    [delivery.id],
                )
        if fails:
            raise ValueError

    messages = [
        add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "lost", "b"])
    ]
    bench.run_all(bench.claim())
    if fails:  # what it did to the row was undone with the rest
        assert attempts_of(messages[1]) == ["ValueError"]
    else:
        assert "lease_lost" in [getattr(r, "event", "") for r in caplog.records]
    assert effects() == {messages[0].pk, messages[2].pk}
    assert waiting() == {messages[1].pk}
    assert sorted(set(bench.settled)) == sorted(ids(messages))


def test_a_row_that_somebody_has_locked_waits_its_turn(bench: Bench) -> None:
    """A renewal has it for a moment: it is still ours, and runs in a later slice."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    messages = add_many(3, handler="h")
    tasks = bench.claim()
    with second_connection() as other:
        with other.transaction():
            other.execute(
                "select from django_mq_queuedmessage where id = %s for update", [messages[1].pk]
            )
            remainder = bench.run(tasks)
            assert [task.delivery.id for task in remainder.locked] == [messages[1].pk]
            assert (remainder.left, remainder.again) == ([], [])
        assert ran == [m.pk for m in messages if m is not messages[1] or bench.aloof]
        assert waiting() == {messages[1].pk}
        bench.run_all(remainder.locked)
    assert ran[-1] == messages[1].pk
    assert waiting() == set()


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("ends", ["returns", "commit", "rollback", "close", "swallows"])
def test_what_ran_while_somebody_had_its_row_is_not_kept(
    bench: Bench, writes: bool, ends: str
) -> None:
    """It may start while the lock is asked for; without the lock it has not begun, uncharged.

    It cannot use its connection then, so it can end nothing, and waits for nobody.
    """
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: ran.append(0))
        if len(ran) == 1 and ends == "swallows":
            for _ in range(2):
                with contextlib.suppress(Exception):
                    effect(delivery)
        elif len(ran) == 1 and ends == "close":
            connection.close()
        elif len(ran) == 1 and ends != "returns":
            connection.connection.execute(ends)
        if writes:
            effect(delivery)

    message = add(handler="h")
    tasks = bench.claim()
    if not bench.young:
        ran.append(message.pk)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        remainder = bench.run(tasks)
        if bench.aloof and (writes or ends != "returns"):  # it was asked for late
            assert (remainder.again, remainder.left, remainder.locked) == (tasks, [], [])
            remainder = bench.run(tasks)
        assert (remainder.locked, remainder.left, remainder.again) == (tasks, [], [])
    assert (effects(), bench.settled) == (set(), [])
    bench.run_all(tasks)
    assert ran == [message.pk, message.pk, 0]
    assert effects() == ({message.pk} if writes else set())
    assert (waiting(), FailedAttempt.objects.count()) == (set(), 0)


@pytest.mark.parametrize(
    "made", ["expires", "key", "suspect", "batch", "several", "unbegun", "announced", "old"]
)
def test_what_must_not_start_before_its_row_is_locked(
    bench: Bench, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However young its claim is; nor what was claimed long ago."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", batch=made == "batch")
    def h(delivery: Any) -> None:
        ran.append(1)

    given: dict[str, dict[str, Any]] = {
        "expires": {"expires_at": timezone.now() + timedelta(hours=1)},
        "suspect": {"suspect": True},
    }
    add_many(2 if made == "several" else 1, handler="h", **given.get(made, {}))
    tasks = bench.claim()
    if made == "key":
        tasks = [task._replace(line=("mail", "h", "k")) for task in tasks]
    if made == "unbegun":  # a new connection: nothing is known of its constraints
        monkeypatch.setattr(bench, "_know", lambda: None)
    if made == "announced":

        def told(**_: Any) -> None: ...

        monkeypatch.setattr(message_started, "receivers", [])
        message_started.connect(told)
    if made == "old":
        tasks[0].delivery._asked_at -= 2000
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        assert bench.run(tasks).locked == tasks
    assert ran == ([1, 1] if made == "several" and bench.aloof else [])


def test_a_handler_that_swallows_that_the_lock_was_refused(bench: Bench) -> None:
    """It ran for nothing: what is left of its transaction cannot be committed."""
    ran: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        try:
            connection.cursor()
            ran.append("fine")
        except psycopg.Error as error:
            ran.append(type(error).__name__)

    first, message = add_many(2, handler="h")
    before, *tasks = bench.claim()
    bench.run([before])
    driver = bench.slices._session.connect()
    driver.execute("set lock_timeout = '10ms'")
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage")
        remainder = bench.run(tasks)
        assert (remainder.left, remainder.again, remainder.locked) == (tasks, [], [])
    assert ran == ["fine"] + ["LockNotAvailable"] * bench.young
    bench.run_all(tasks)
    assert ran[1 + bench.young :] == ["fine"]
    assert (bench.settled, waiting()) == ([first.pk, message.pk], set())
    assert FailedAttempt.objects.count() == 0


def test_the_time_of_a_handler_does_not_run_while_its_row_is_not_locked(bench: Bench) -> None:
    """Somebody has the whole table for long: that is not the handler's fault.

    And other threads, which have the driver's connection, wait until it is free.
    """

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.id == message.pk:
            connection.cursor()

    before, message = add_many(2, handler="h")
    tasks = bench.claim()
    bench.run(tasks[:1])
    driver = bench.slices._session.connect()
    pid = driver.info.backend_pid
    seen: list[list[int]] = []
    held: list[bool] = []

    def wait_for_it() -> None:
        other.execute("begin; lock table django_mq_queuedmessage")
        locked.set()
        is_waiting = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        deadline = monotonic() + 30
        while monotonic() < deadline and not other.execute(is_waiting, [pid]).fetchone()[0]:
            other.execute("select pg_sleep(0.01)")
        seen.append(bench.board.running())
        held.append(driver.lock.locked())
        other.execute("commit")

    locked = threading.Event()
    with second_connection() as other:
        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert locked.wait(30)
        bench.run(tasks[1:])
        thread.join()
    begun = [message.pk] * bench.aloof  # who is locked for late is to blame for what happens now
    assert (seen, bench.settled) == ([begun], [before.pk, message.pk])
    assert held == [True] or not bench.young


def test_a_shut_queue_and_a_locked_row_give_back_one_task(bench: Bench) -> None:
    """Each task comes back once, whatever hinders it."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    tasks = bench.claim()
    bench.slices._shut = Shut()
    bench.slices._shut.queue("mail", None)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        remainder = bench.run(tasks)
    assert [*remainder.left, *remainder.locked, *remainder.again] == tasks


def test_the_answer_that_a_handler_takes_away(bench: Bench) -> None:
    """By libpq's connection, kept from an earlier message: it runs again, behind the lock."""
    kept: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        for pgconn in kept:
            pgconn.exec_(b"select 1")
        effect(delivery)
        kept.append(connection.connection.pgconn)

    messages = add_many(2, handler="h")
    for task in bench.claim():
        bench.run_all([task])
    assert (effects(), waiting()) == (ids(messages), set())
    assert FailedAttempt.objects.count() == 0


def test_a_wait_for_the_lock_that_is_interrupted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a time limit that raises in the thread: a handler that deals with it goes on."""

    class TimeUp(Exception):
        pass

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if bench.young:  # else the answer was there before the handler
            interrupts.append(TimeUp())
            with pytest.raises(TimeUp):
                connection.cursor()
        effect(delivery)

    def answers(driver: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return plain(driver)

    interrupts: list[Exception] = []
    plain = locking._answers
    monkeypatch.setattr(locking, "_answers", answers)
    message = add(handler="h")
    bench.run_all(bench.claim())
    assert (effects(), bench.settled) == ({message.pk}, [message.pk])


def test_a_row_that_stays_locked_is_not_asked_for_without_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 16: with nothing else to do it rests before the next try."""
    rests: list[bool] = []
    monkeypatch.setattr(bench.slices._outage, "wait_quietly", lambda: rests.append(True))

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    first, _ = add_many(2, handler="h")
    tasks = bench.claim()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [first.pk])
        remainder = bench.run(tasks)
        assert rests == []  # it had something else to do
        assert waiting() == {first.pk}
        bench.run(remainder.locked)
        assert rests == [True]


# ---- the database goes away


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("arrives", [True, False], ids=["committed", "not committed"])
def test_commit_without_an_answer(
    make_bench: Callable[..., Bench], proxy: Proxy, arrives: bool, count: int
) -> None:
    """Guarantee 1: what the server says of the transaction decides; nothing is charged."""
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
    lost = 0 if arrives else 1 if bench.aloof else count
    assert attempts == [1] * (count + lost)
    assert sorted(hooks) == sorted(ids(messages))
    assert sorted(bench.settled) == sorted(ids(messages))
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize("word", ["for no key update skip locked", "delete from django_mq"])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_cut_at_our_own_statements_charges_nobody(
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
    """Nobody wrote anything: all run again, and nobody is charged."""
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


def test_a_failure_that_the_database_refuses_to_write_down_stops_nobody(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 11: the attempt counts all the same (the lease lapses), and others go on.

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
    assert "settle_refused" in [getattr(r, "event", "") for r in caplog.records]


# ---- other ends of a delivery


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


@pytest.mark.parametrize("do", [None, *BREAKS], ids=lambda do: do.__name__ if do else "raise")
def test_a_batch_that_fails_runs_one_by_one(
    bench: Bench, do: Callable[[Delivery], None] | None
) -> None:
    """PMQ-21, PMQ-58 as changed: one bad message does not take the others along."""
    calls: list[list[str]] = []

    @handler("#", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        calls.append([each.payload for each in deliveries])
        for each in deliveries:
            if each.payload == "bad":
                if do is None:
                    raise ValueError
                do(each)
                return
            effect(each)

    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad", "b"])]
    if do is not None and "commit" in do.__name__:
        pytest.skip("what a batch committed itself is done twice: it was told")
    bench.run_all(bench.claim())
    assert calls == [["a", "bad", "b"], ["a"], ["bad"], ["b"]]
    assert effects() == {messages[0].pk, messages[2].pk}
    assert waiting() == {messages[1].pk}
    assert len(attempts_of(messages[1])) == 1
    assert stored(messages[1]).attempts == 1


def test_expired_messages_do_not_start(bench: Bench, said: Said) -> None:
    ran: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)

    add(handler="h", payload="a", expires=60)
    expired = add(handler="h", payload="b", expires=-1)
    bench.run_all(bench.claim())
    assert ran == ["a"]
    stored(expired)
    assert (expired.dead_reason, expired.attempts) == ("expired", 0)
    assert expired.dead_at is not None
    assert said.ids("message_dead") == [expired.pk]
    assert said.count("message_started") == 1


def test_retry_snooze_reject(bench: Bench, said: Said) -> None:
    """CAR-22, CAR-25 as changed, NSQ-12, NSQ-13, NSQ-14, RMQ-9."""
    at = timezone.now() + timedelta(hours=2)
    raised = {
        "policy": Retry(),
        "later": Retry(after=300),
        "then": Retry(after=at),
        "snooze": Snooze(300),
        "snooze then": Snooze(at),
        "reject": Reject("no such order"),
    }

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        effect(delivery)
        raise raised[delivery.payload]

    messages = {p: add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(raised)}
    bench.run_all(bench.claim())
    assert effects() == set()
    now = timezone.now()
    waits = {}
    for name, message in messages.items():
        stored(message)
        waits[name] = round((message.processable_after - now).total_seconds(), -1)
        assert (message.leased_until, message.claimed_by) == (None, None)
    assert (waits["policy"], waits["later"], waits["snooze"]) == (60, 300, 300)
    assert messages["then"].processable_after == messages["snooze then"].processable_after == at
    assert {name: m.attempts for name, m in messages.items()} == {
        "policy": 1, "later": 1, "then": 1, "snooze": 0, "snooze then": 0, "reject": 1,
    }  # fmt: skip
    assert {name: m.dead_reason for name, m in messages.items() if m.dead_at} == {
        "reject": "no such order"
    }
    assert said.count("message_retried") == 3
    assert said.ids("message_dead") == [messages["reject"].pk]
    assert bench.back == [True]


def test_the_last_attempt_is_final(bench: Bench) -> None:
    """NSQ-19: the message says how many, whatever the handler's policy."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=50, backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        raise Retry(after=0)

    message = add(handler="h", max_attempts=3)
    for _ in range(3):
        bench.run_all(bench.claim())
    stored(message)
    assert (message.attempts, message.dead_reason) == (3, "exhausted")
    assert len(attempts_of(message)) == 3
    assert bench.claim() == []


@pytest.mark.parametrize(
    "backoff", [lambda attempt: 1 / 0, lambda attempt: -5, lambda attempt: "soon"]
)
def test_a_policy_that_fails_counts_as_one_second(bench: Bench, backoff: Any) -> None:
    """PMQ-54 as changed."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=backoff))
    def h(delivery: Delivery) -> None:
        raise ValueError

    message = add(handler="h")
    bench.run_all(bench.claim())
    wait = stored(message).processable_after - timezone.now()
    assert timedelta(0) < wait <= timedelta(seconds=1)


def test_a_policy_that_the_message_carries_wins_unless_it_is_none(bench: Bench) -> None:
    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(1000)))
    def h(delivery: Delivery) -> None:
        raise ValueError

    own = add(handler="h", retry={"kind": "fixed", "seconds": 100})
    bad = [
        add(handler="h", retry=retry)
        for retry in ([], 5, "fixed", {}, {"kind": "fixed"}, {"kind": "fixed", "x": 1},
                      {"kind": "exponential", "base": {}, "cap": []},
                      {"kind": "fixed", "seconds": 1e400 if False else "x"})
    ]  # fmt: skip
    bench.run_all(bench.claim())
    now = timezone.now()
    assert round((stored(own).processable_after - now).total_seconds(), -1) == 100
    for each in bad:
        assert round((stored(each).processable_after - now).total_seconds(), -1) == 1000


def test_a_payload_that_cannot_be_decoded_is_held(bench: Bench) -> None:
    """Guarantee 14: held, not burned."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert delivery.payload

    message = add(handler="h")
    with second_connection() as other:
        other.execute("update django_mq_queuedmessage set payload = %s::jsonb", ["1" * 5000])
    bench.run_all(bench.claim())
    found = QueuedMessage.objects.values("held_since", "last_error").get(
        pk=message.pk, dead_at=None, attempts=0
    )
    assert found["held_since"] is not None
    assert "cannot be decoded" in found["last_error"]


def test_a_held_message_that_runs_after_all_is_held_no_more(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise ValueError

    message = add(handler="h", held=-100)
    bench.run_all(bench.claim())
    assert stored(message).held_since is None


# ---- the limits of a slice


def test_a_slice_ends_when_its_time_is_over(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(slice_seconds=1e-9)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    messages = add_many(3, handler="h")
    remainder = bench.run(bench.claim())
    assert [task.delivery.id for task in remainder.left] == [m.pk for m in messages[1:]]
    assert waiting() == ids(messages[1:])


@behind_a_lock
def test_a_slice_has_fifty_savepoints_at_most(bench: Bench) -> None:
    """More of them spill over in every other backend's snapshot."""

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


def test_the_lock_of_one_is_planned_once_and_by_its_index(bench: Bench) -> None:
    """Also where the table was empty when it was; the handler's settings are its session's."""
    seen: list[tuple[str, str]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "select current_setting('enable_seqscan'), current_setting('plan_cache_mode')"
            )
            seen.append(cursor.fetchone())

    for _ in range(3):
        if bench.aloof:
            bench.slices._aloof._slices_left = Everybody()
        add(handler="h")
        with second_connection() as other:
            other.execute("vacuum analyze django_mq_queuedmessage")
        bench.run_all(bench.claim())
    assert seen == [("on", "auto")] * 3
    driver = connection.connection
    name = "django_mq_lock_one_patiently" if bench.aloof else "django_mq_lock_one"
    plans = driver.execute(
        "select generic_plans, custom_plans from pg_prepared_statements where name = %s", [name]
    ).fetchall()
    assert plans == [(3, 0)]
    driver.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
    explained = driver.execute(f"explain execute {name} (1, 1, 'me:1', '{{}}', '{{}}')")
    plan = " ".join(line for (line,) in explained.fetchall())
    driver.execute("reset plan_cache_mode; reset enable_seqscan")
    assert "Index Scan using django_mq_queuedmessage_pkey" in plan


def test_a_handler_may_deallocate_what_is_prepared(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        connection.connection.execute("deallocate all")

    messages = [add(handler="h", after=-60 + n) for n in range(4)]
    first, *tasks = bench.claim()
    bench.run_all([first])
    for task in tasks[: bench.young]:
        assert bench.run([task]).again == [task]  # as if it had not begun; and from now on
    for task in tasks:
        remainder = bench.run([task])
        assert (remainder.left, remainder.again) == ([], [])
    assert effects() == ids(messages)
    assert FailedAttempt.objects.count() == 0


def test_one_alone_that_is_not_ours_or_expired_does_not_run(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)

    gone, fine = add(handler="h"), add(handler="h")
    expired = add(handler="h", expires_at=timezone.now() + timedelta(hours=1))
    tasks = {task.delivery.id: task for task in bench.claim()}
    QueuedMessage.objects.filter(pk=gone.pk).update(claimed_by="you:1")
    QueuedMessage.objects.filter(pk=expired.pk).update(expires_at=timezone.now())
    for message in (gone, expired, fine):
        bench.run([tasks[message.pk]])
    assert effects() == {fine.pk}
    assert stored(gone).claimed_by == "you:1"
    assert stored(expired).dead_reason == "expired"


# ---- the savepoint is lazy


@pytest.fixture
def statements(bench: Bench) -> list[str]:
    """What goes to the server through the savepoint's own cursor."""
    seen: list[str] = []
    original = psycopg.ClientCursor.execute

    def execute(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        text = query if isinstance(query, str | bytes) else query.as_string(None)
        seen.append(text.decode() if isinstance(text, bytes) else text)
        return original(self, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.ClientCursor, "execute", execute)
        yield seen


KEPT: list[Any] = []  # a cursor of an earlier delivery, as a module may keep one
TOUCHES: dict[str, Callable[[], Any]] = {
    "kept_cursor": lambda: KEPT.pop().execute("select 1"),
    "cursor": lambda: connection.cursor(),
    "chunked_cursor": lambda: connection.chunked_cursor(),
    "orm": lambda: Product.objects.count(),
    "iterator": lambda: list(Product.objects.iterator(chunk_size=2)),
    "driver": lambda: connection.connection,
    "atomic": lambda: transaction.atomic().__enter__() and None,
    "ensure_connection": lambda: connection.ensure_connection(),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_the_savepoint_opens_with_the_first_touch(
    bench: Bench, statements: list[str], touch: str
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if touch == "atomic":
            with transaction.atomic():
                pass
        else:
            TOUCHES[touch]()

    connection.ensure_connection()
    KEPT[:] = [connection.cursor()]
    add(handler="h")
    bench.run_all(bench.claim())
    assert sum("django_mq_delivery" in s for s in statements) == 1


def test_a_handler_that_touches_nothing_opens_none(bench: Bench, statements: list[str]) -> None:
    """5 us against 145 us."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert delivery.payload == {}
        transaction.on_commit(lambda: None)
        assert connection.in_atomic_block
        if delivery.id % 2:
            raise ValueError

    add_many(4, handler="h")
    bench.run_all(bench.claim())
    assert not any("savepoint" in s.lower() for s in statements)


@pytest.mark.parametrize("touch", [*TOUCHES, None])
def test_the_session_is_taken_back_after_hooks_that_used_it(
    bench: Bench, statements: list[str], touch: str | None
) -> None:
    """Only then: it would cost each slice a tenth of its time."""
    do = TOUCHES.get(touch or "", lambda: None)
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        transaction.on_commit(do)
        transaction.on_commit(lambda: hooks.append("the next one runs too"))

    connection.ensure_connection()
    KEPT[:] = [connection.cursor()]
    add(handler="h")
    bench.run_all(bench.claim())
    assert len(hooks) == 1
    assert any("reset all" in s for s in statements) == (touch is not None)


@behind_a_lock
def test_who_follows_a_writer_finds_its_savepoint_open(bench: Bench, statements: list[str]) -> None:
    """A round trip less for each; and what is undone is its own alone, as ever."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload != "reads nothing":
            effect(delivery)
        if delivery.payload == "fails":
            raise ValueError

    payloads = ["writes", "writes", "reads nothing", "fails", "reads nothing", "writes"]
    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(payloads)]
    bench.run_all(bench.claim())
    assert effects() == {messages[place].pk for place in (0, 1, 5)}
    assert waiting() == {messages[3].pk}
    ends = [text for text in statements if "django_mq_delivery" in text]
    opened = [text.endswith("; savepoint django_mq_delivery") for text in ends]
    assert opened == [True, True, False, False]  # the failure's end opens none, nor the last one


@pytest.mark.parametrize("last", ["writes", "reads nothing", "fails"])
def test_a_settle_is_not_in_a_savepoint(
    bench: Bench, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows locked by a transaction and removed by its subtransaction cost a multixact a slice."""
    monkeypatch.setattr(slices_module, "MOST_SAVEPOINTS", 4)

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        if delivery.payload != "reads nothing":
            effect(delivery)
        if delivery.payload == "fails":
            raise ValueError

    removed: list[tuple[int, int]] = []
    ack = settle.ack

    def watching(cursor: Any, fences: Any) -> Any:
        cursor.execute("select pg_current_xact_id()::text::bigint")
        (top,) = cursor.fetchone()
        found = ack(cursor, fences)
        cursor.execute(
            "insert into shop_product (name, price, stock) values (%s, 1, 0)"
            " returning xmin::text::bigint",
            [f"settled {len(removed)}"],
        )
        removed.append((top % 2**32, cursor.fetchone()[0]))
        return found

    monkeypatch.setattr(settle, "ack", watching)
    for n in range(9):
        add(handler="h", payload=last if n % 3 == 2 else "writes", after=-60 + n)
    rows = bench.claim()
    while rows:
        rows = bench.run(rows).left
    assert removed
    assert all(top == own for top, own in removed)


def test_a_failed_handlers_writes_through_the_driver_are_undone(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        connection.connection.execute(
            "insert into shop_product (name, price, stock) values (%s, 1, 0)",
            [f"message {delivery.id}"],
        )
        if delivery.payload == "bad":
            raise ValueError

    good, bad = (add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad"]))
    bench.run_all(bench.claim())
    assert effects() == {good.pk}
    assert waiting() == {bad.pk}


# ---- what is said


def test_signals_are_sent_once_and_robustly(bench: Bench, said: Said) -> None:
    """NSQ-33: After the commit that made them true, also when a receiver raises."""

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
def test_what_a_receiver_leaves_open_does_not_swallow_the_next_slice(
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


def test_the_board_shows_what_runs(bench: Bench) -> None:
    seen: list[list[int]] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(bench.board.running())
        raise ValueError

    messages = add_many(2, handler="h")
    bench.run_all(bench.claim())
    assert seen == [[m.pk] for m in messages]
    assert bench.board.running() == []
