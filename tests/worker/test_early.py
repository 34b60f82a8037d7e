"""The early start: what may begin before its row is locked, and what of it is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.worker import locking
from django_mq.worker.database import Statements
from django_mq.worker.early import EarlyStart
from django_mq.worker.locking import Locker
from django_mq.worker.session import Session
from tests.database import second_connection
from tests.rows import add
from tests.worker.conftest import Bench, add_many, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)

STATE = "select state from pg_stat_activity where pid = %s"
WAITS = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"


young = pytest.mark.parametrize("make_bench", ["young"], indirect=True)
aloof = pytest.mark.parametrize("make_bench", ["aloof"], indirect=True)


@pytest.fixture
def other() -> Iterator[psycopg.Connection[Any]]:
    with second_connection() as other:
        yield other


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note when the server is asked to lock a row."""
    events: list[str] = []
    send = locking._send

    def noting(driver: Any, statements: str) -> None:
        if "prepare" not in statements:
            events.append("lock")
        send(driver, statements)

    monkeypatch.setattr(locking, "_send", noting)
    return events


@young
def test_who_left_its_connection_alone_is_not_locked_for_the_next_time(
    bench: Bench, events: list[str], other: psycopg.Connection[Any]
) -> None:
    """And has no transaction open, unless it uses its connection: then its row is locked."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        events.append("starts")
        if "lock" not in events:
            assert other.execute(STATE, [pid]).fetchone() == ("idle",)
        if delivery.payload == "writes":
            effect(delivery)
            assert other.execute(STATE, [pid]).fetchone() == ("idle in transaction",)
            query = "select from django_mq_queuedmessage for update skip locked"
            assert other.execute(query).fetchall() == []

    seen: list[list[str]] = []
    for payload in ("", "", "writes", "writes", "", ""):
        message = add(handler="h", payload=payload)
        tasks = bench.claim()
        connection.ensure_connection()
        pid = connection.connection.info.backend_pid
        bench.run(tasks)
        assert (bench.settled[-1], waiting()) == (message.pk, set())
        seen.append(events.copy())
        events.clear()
    at_once, late = ["lock", "starts"], ["starts", "lock"]
    assert seen == [at_once, late, late, at_once, at_once, late]
    assert effects() == set(bench.settled[2:4])


@young
def test_it_counts_for_each_handler(bench: Bench, events: list[str]) -> None:
    @handler("one", queue="mail", name="one")
    def one(delivery: Delivery) -> None:
        events.append("one")

    @handler("two", queue="mail", name="two")
    def two(delivery: Delivery) -> None:
        events.append("two")
        effect(delivery)

    for name in ("one", "two") * 2:
        add(handler=name, type=name)
        bench.run(bench.claim())
    assert events == ["lock", "one", "lock", "two", "one", "lock", "lock", "two"]


@aloof
@pytest.mark.parametrize("uses", [False, True])
def test_a_renewal_of_a_row_that_is_not_locked_is_waited_for(
    bench: Bench, other: psycopg.Connection[Any], uses: bool
) -> None:
    """It takes a moment: nobody may run twice for that."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        other.execute("begin")
        other.execute("update django_mq_queuedmessage set leased_until = now() + interval '1 min'")
        thread.start()
        if uses:
            with connection.cursor() as cursor:
                cursor.execute("show lock_timeout")
                assert cursor.fetchone() == ("0",)

    def commit_when_it_waits() -> None:
        deadline = monotonic() + 30
        while monotonic() < deadline and not other.execute(WAITS, [pid]).fetchone()[0]:  # type: ignore[index]
            other.execute("select pg_stat_clear_snapshot()")
        waited.append(monotonic() < deadline)
        other.execute("commit")

    waited: list[bool] = []
    thread = threading.Thread(target=commit_when_it_waits)
    message = add(handler="h")
    tasks = bench.claim()
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid
    bench.run_all(tasks)
    thread.join()
    assert (ran, waited, bench.settled, waiting()) == ([message.pk], [True], [message.pk], set())


@aloof
def test_what_was_taken_over_meanwhile_is_not_settled(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    """Guarantee 4: by its fence, as everything."""
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        transaction.on_commit(lambda: hooks.append(1))
        other.execute("update django_mq_queuedmessage set attempts = 2, claimed_by = 'x:1'")

    message = add(handler="h")
    bench.run_all(bench.claim())
    assert (hooks, waiting(), bench.settled) == ([], {message.pk}, [message.pk])
    assert bench.runs == [[message.pk]]  # somebody else runs it


@aloof
def test_a_hook_of_one_that_was_not_locked_uses_its_connection(bench: Bench) -> None:
    """Nothing asks for the lock of a message that is gone."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        transaction.on_commit(look)

    def look() -> None:
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from django_mq_queuedmessage")
            seen.append((cursor.fetchone(), connection.in_atomic_block))

    add(handler="h")
    bench.run_all(bench.claim())
    assert seen == [((0,), False)]


@aloof
@pytest.mark.parametrize("raises", [False, True])
def test_a_connection_that_is_lost_while_it_is_not_used(
    bench: Bench, other: psycopg.Connection[Any], raises: bool
) -> None:
    """As by idle_session_timeout: nothing of what ran is lost with it, so nobody runs twice."""
    ran: list[int] = []
    hooks: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        transaction.on_commit(lambda: hooks.append(delivery.id))
        pid = bench.wrapper.__dict__["connection"].info.backend_pid
        other.execute("select pg_terminate_backend(%s, 10000)", [pid])
        if raises:
            raise ValueError("and it failed")

    message = add(handler="h", max_attempts=5)
    bench.run_all(bench.claim())
    assert (ran, bench.settled) == ([message.pk], [message.pk])
    assert waiting() == ({message.pk} if raises else set())
    assert hooks == ([] if raises else [message.pk])
    assert FailedAttempt.objects.count() == raises


@aloof
def test_the_time_of_a_handler_goes_on_when_it_is_locked_late(bench: Bench) -> None:
    """Its deadline stays what it was when it started, but for the time it waited."""
    deadlines: list[float] = []

    @handler("#", queue="mail", name="h", timeout=100)
    def h(delivery: Delivery) -> None:
        deadlines.extend(entry.deadline for entry in bench.board.read("bench"))
        until = monotonic() + 0.3
        while monotonic() < until:
            pass
        began = monotonic()
        connection.cursor()
        waited.append(monotonic() - began)
        deadlines.extend(entry.deadline for entry in bench.board.read("bench"))

    waited: list[float] = []
    add(handler="h")
    bench.run_all(bench.claim())
    assert 0 <= deadlines[1] - deadlines[0] + 0.01 <= waited[0] + 0.02


@young
def test_nothing_starts_early_within_a_transaction_of_somebody_else(bench: Bench) -> None:
    """Its end is not ours to say."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    add(handler="h")
    (task,) = bench.claim()
    bench.slices.close()
    with transaction.atomic():
        session = Session(bench.wrapper)
        session.connect()
        session.savepoint.begin({}, own_session=False)
        assert EarlyStart(session, Locker(session), None).ask(task, {}) is None  # type: ignore[arg-type]
        session.close()
    bench.slices._session = Session(bench.wrapper)


# ---- what is done before somebody waits for it


@young
def test_the_next_transaction_is_entered_ahead_and_nothing_is_sent(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    bench.slices.get_ready()
    assert bench.wrapper.connection is None  # nor is a connection made
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid
    for _ in range(2):
        bench.slices.get_ready()
        assert connection.in_atomic_block
        assert other.execute(STATE, [pid]).fetchone() == ("idle",)
    bench.slices.stand_down()
    bench.slices.stand_down()
    assert (connection.in_atomic_block, connection.get_autocommit()) == (False, True)
    assert connection.connection.info.backend_pid == pid


@young
def test_a_slice_fails_as_ever_where_the_next_one_was_entered_ahead(
    bench: Bench, other: psycopg.Connection[Any]
) -> None:
    """The server went away meanwhile: it is waited for, and nobody is charged."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        effect(delivery)

    messages = add_many(2, handler="h")
    first, *rest = bench.claim()
    bench.run_all([first])
    bench.slices.get_ready()
    pid = connection.connection.info.backend_pid
    other.execute("select pg_terminate_backend(%s, 10000)", [pid])
    bench.run_all(rest)
    assert effects() == {message.pk for message in messages}
    assert (waiting(), FailedAttempt.objects.count()) == (set(), 0)


def test_a_handler_outside_transactions_is_outside_one_that_was_entered_ahead(
    start: Callable[..., Any],
) -> None:
    """One thread runs both, in turn."""
    seen: list[bool] = []

    @handler("inside", queue="mail", name="inside")
    def inside(delivery: Delivery) -> None:
        seen.append(connection.in_atomic_block)
        effect(delivery)

    @handler("outside", queue="mail", name="outside", atomic=False)
    def outside(delivery: Delivery) -> None:
        seen.append(connection.in_atomic_block)
        effect(delivery)
        with second_connection() as other:
            rows = other.execute("select count(*) from shop_product").fetchone()
            assert rows == (len(seen),)

    for place, name in enumerate(("inside", "outside") * 2):
        add(handler=name, type=name, after=-60 + place)
    assert start(until_empty=True, threads=1).join()
    assert seen == [True, False] * 2
    assert FailedAttempt.objects.count() == 0


def test_each_statement_of_the_worker_has_its_answer(transactional_db: None) -> None:
    """By a cursor of its own; that which was said last is the one that is read."""
    statements = Statements("default")
    cursor = statements.cursor()
    assert cursor is statements.cursor()
    for number in range(3):
        cursor.execute("select %(number)s::int as one", {"number": number})
        assert cursor.fetchall() == [(number,)]
        cursor.execute("select x from generate_series(1, 2) x")
        assert (cursor.rowcount, cursor.fetchone()) == (2, (1,))
    cursor.connection.close()
    assert statements.cursor().execute("select 1").fetchone() == (1,)
    statements.close()
