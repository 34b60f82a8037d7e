"""The early start: what may begin before its row is locked, and what of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from django_mq.worker.aloof import Aloof
from django_mq.worker.database import Statements, plain_connection
from django_mq.worker.early import EarlyStart
from django_mq.worker.locking import Locker
from django_mq.worker.session import Session
from tests.database import second_connection
from tests.rows import add
from tests.worker.conftest import Bench, add_many, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)

STATE = "select state from pg_stat_activity where pid = %s"


young = pytest.mark.parametrize("make_bench", ["young"], indirect=True)


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
        locker = Locker(session)
        early = EarlyStart(session, locker, None, ours_for=1000.0)  # type: ignore[arg-type]
        assert early.ask(task, {}) is None
        aloof = Aloof(session, locker, None, ours_for=1000.0)  # type: ignore[arg-type]
        aloof._slices_left[task.handler] = 0
        assert not aloof.may_run([task])
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


@pytest.fixture
def session(transactional_db: None) -> Iterator[Session]:
    before = connections["default"]
    connections["default"] = wrapper = plain_connection("default")
    session = Session(wrapper)
    session.connect()
    yield session
    session.reset()
    connections["default"] = before


def test_a_session_that_is_closed_while_ready_leaves_the_block(session: Session) -> None:
    session.get_ready()
    assert session.wrapper.in_atomic_block
    session.close()
    assert not session.wrapper.in_atomic_block
    assert session.wrapper.get_autocommit()


def test_a_session_that_is_reset_while_ready_is_not_ready(session: Session) -> None:
    """Its block was of the connection that is gone."""
    session.get_ready()
    session.reset()
    session.connect()
    with session.block():
        assert session.wrapper.in_atomic_block
        session.cursor().execute("create table worker_kept ()")
    with second_connection() as other:
        other.execute("drop table worker_kept")  # it was committed
    session.close()


@pytest.mark.parametrize("left", ["a transaction", "a block"])
def test_a_session_gets_ready_on_a_clean_connection_only(session: Session, left: str) -> None:
    """Whatever a hook left open."""
    pid = session.connect().info.backend_pid
    if left == "a block":
        transaction.atomic().__enter__()
    else:
        session.wrapper.connection.execute("begin")
    session.get_ready()
    assert session.wrapper.connection is None
    session.connect()
    session.get_ready()
    assert session.wrapper.in_atomic_block
    assert session.wrapper.connection.info.backend_pid != pid
    session.close()


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
