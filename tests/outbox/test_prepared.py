"""Statements of producers that the server keeps prepared, and where it must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import SimpleTestCase
from django.test.testcases import DatabaseOperationForbidden
from django.utils import timezone

from django_mq import Message, RetryPolicy, broadcast, broadcast_many, handlers
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage
from django_mq.outbox import notify as bell
from django_mq.outbox import prepared as preparing
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.write import RowWriter
from django_mq.store.insert import FEW
from django_mq.store.rows import NewRow
from tests.database import listening, second_connection

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A session in which nothing is prepared, and none left for others."""
    connection.close()
    with handlers.isolated():
        yield
    connection.close()


def driver() -> psycopg.Connection[Any]:
    found: psycopg.Connection[Any] = connection.connection
    return found


def prepared() -> int:
    """How many statements of ours the server has prepared in this session."""
    found = driver().execute(
        "select count(*) from pg_prepared_statements"
        " where statement like '%%insert into django_mq_queuedmessage%%'"
    )
    return found.fetchall()[0][0]  # type: ignore[no-any-return]


def send(count: int) -> None:
    with transaction.atomic():
        for _ in range(count):
            broadcast("a.b")


@contextmanager
def undone() -> Iterator[None]:
    """A transaction that is rolled back."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def test_what_is_said_often_is_prepared() -> None:
    send(1)
    assert prepared() == 0
    send(4)
    assert prepared() == 1
    assert QueuedMessage.objects.count() == 5


def test_the_ring_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sleeps waits for it."""
    monkeypatch.setattr(bell, "PAUSE", 0.0)
    for _ in range(4):
        send(1)
    rings = driver().execute(
        "select count(*) from pg_prepared_statements where statement like '%%pg_notify%%'"
    )
    assert rings.fetchone() == (1,)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("DISABLE_SERVER_SIDE_CURSORS", True), ("OPTIONS", {"prepare_threshold": None})],
)
def test_nothing_is_prepared_where_the_alias_says_no(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: Any
) -> None:
    """Behind a transaction pooler the next statement may meet another server process."""
    if isinstance(value, dict):
        value = {**connection.settings_dict[setting], **value}
    monkeypatch.setitem(connection.settings_dict, setting, value)
    send(5)
    assert prepared() == 0


def test_a_rollback_leaves_them_prepared() -> None:
    """The driver deallocates all when it prepared some itself, and a rollback comes."""
    send(5)
    for _ in range(2):
        with undone():
            broadcast("a.b")
        send(1)
    assert prepared() == 1
    assert QueuedMessage.objects.count() == 7


def test_where_the_driver_prepares_its_own_way_is_taken() -> None:
    """By OPTIONS."""
    with connection.cursor():
        driver().prepare_threshold = 1
    for _ in range(2):
        with undone():
            for _ in range(4):
                broadcast("a.b")
            assert prepared() == 1
    send(5)
    assert driver().prepare_threshold == 1
    assert QueuedMessage.objects.count() == 5


def test_every_shape_of_a_few_rows_is_prepared() -> None:
    """One plain row, one with options (times, nulls, numbers), several of them."""
    due = timezone.now() + timedelta(days=1)
    for _ in range(5):
        with transaction.atomic():
            broadcast("a.b", {"text": "a 'quoted' \u20ac \\ text"})
            broadcast("a.b", after=due, expires=due + timedelta(hours=1), priority=-3, key="k")
            broadcast("a.b", after=1.5, metadata={"a": None}, retry=RetryPolicy(max_attempts=2))
            broadcast_many([Message("a.b", n) for n in range(3)])
    assert prepared() == 3
    rows = QueuedMessage.objects.order_by("pk")
    for start in range(0, 30, 6):
        plain, late, soon, *few = rows[start : start + 6]
        assert plain.payload == {"text": "a 'quoted' \u20ac \\ text"}
        assert (late.processable_after, late.expires_at) == (due, due + timedelta(hours=1))
        assert (late.priority, late.key, late.retry) == (-3, "k", None)
        assert soon.processable_after - soon.created_at == timedelta(seconds=1.5)
        assert (soon.metadata, soon.max_attempts) == ({"a": None}, 2)
        assert [each.payload for each in few] == [0, 1, 2]


def test_the_first_statement_of_a_transaction_begins_it() -> None:
    """The driver says BEGIN with the first statement, and this one goes past it."""
    send(5)
    with undone():
        broadcast("a.b")
    assert QueuedMessage.objects.count() == 5


def test_what_the_alias_says_of_transactions_holds() -> None:
    with connection.cursor():
        driver().isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    send(5)
    with transaction.atomic():
        broadcast("a.b")
        with connection.cursor() as cursor:
            cursor.execute("show transaction_isolation")
            assert cursor.fetchone() == ("repeatable read",)


def test_without_a_transaction(settings: Any) -> None:
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}
    for count in range(1, 6):
        broadcast("a.b")
        assert QueuedMessage.objects.count() == count
        assert driver().info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert prepared() == 1


def test_what_somebody_deallocated_is_prepared_again() -> None:
    """One transaction breaks, as any prepared statement's would; the next does not."""
    send(5)
    with connection.cursor() as cursor:
        cursor.execute("deallocate all")
    with pytest.raises(DatabaseError, match="does not exist"):
        send(1)
    send(5)
    assert prepared() == 1
    assert QueuedMessage.objects.count() == 10


@pytest.mark.parametrize("interrupted", [True, False], ids=["interrupted", "deallocated"])
def test_what_the_server_still_has_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """One of several is deallocated, or an interrupt comes between PREPARE and its count."""
    real = preparing.results

    def interrupt(driver: psycopg.Connection[Any]) -> Any:
        real(driver)
        raise KeyboardInterrupt

    def send_three() -> None:
        with transaction.atomic():
            broadcast_many([Message("a.b")] * 3)

    if interrupted:
        send(2)
        send_three()
        send_three()
        with transaction.atomic():
            QueuedMessage.objects.count()  # else the first answer is that of BEGIN
            monkeypatch.setattr(preparing, "results", interrupt)
            with pytest.raises(KeyboardInterrupt):
                broadcast("a.b")
            monkeypatch.setattr(preparing, "results", real)
            transaction.set_rollback(True)
    else:
        for _ in range(4):
            send(1)
            send_three()
        name = driver().execute(
            "select name from pg_prepared_statements"
            " where statement like '%%(queue, type, payload, max_attempts, handler)%%values%%'"
        )
        driver().execute(f"deallocate {name.fetchall()[0][0]}")
        with pytest.raises(DatabaseError, match="does not exist"):
            send(1)
    before = QueuedMessage.objects.count()
    for _ in range(5):
        send(1)
        send_three()
    assert QueuedMessage.objects.count() == before + 20


def test_a_ring_that_somebody_deallocated_rings_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bell, "PAUSE", 0.0)
    with listening() as listener:
        for _ in range(4):
            send(1)
        assert len(listener.heard()) == 4
        driver().execute("deallocate all")
        with transaction.atomic():
            broadcast_many([Message("a.b")] * (FEW + 1))
        assert len(listener.heard()) == 1


def test_a_connection_that_is_lost_when_it_rings_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Django looks at those in which it saw an error, at the end of a request."""
    monkeypatch.setattr(bell, "PAUSE", 0.0)
    for _ in range(4):
        send(1)
    with transaction.atomic():
        transaction.on_commit(lose)
        broadcast_many([Message("a.b")] * (FEW + 1))
    assert connection.errors_occurred
    connection.close_if_unusable_or_obsolete()
    send(1)


def lose() -> None:
    """The server ends our session."""
    pid = driver().info.backend_pid
    with second_connection() as other:
        other.execute("select pg_terminate_backend(%s, 30000)", [pid])


@pytest.mark.parametrize("threshold", [None, 1])
def test_a_lost_connection_is_noticed_where_django_checks_it(
    monkeypatch: pytest.MonkeyPatch, settings: Any, threshold: int | None
) -> None:
    """CONN_HEALTH_CHECKS: before the first statement of a request; here that is a broadcast."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "REQUIRE_ATOMIC": False}
    send(4)
    driver().prepare_threshold = threshold
    lose()
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    monkeypatch.setattr(connection, "health_check_enabled", True)
    monkeypatch.setattr(connection, "health_check_done", False)
    broadcast("a.b")
    assert QueuedMessage.objects.count() == 5


@pytest.mark.parametrize("threshold", [None, 1])
def test_who_replaces_the_cursor_sees_our_statements(threshold: int | None) -> None:
    """As SimpleTestCase does, which allows no queries."""
    send(4)
    driver().prepare_threshold = threshold

    class Forbidding(SimpleTestCase):
        pass

    Forbidding.setUpClass()
    try:
        with pytest.raises(DatabaseOperationForbidden), transaction.atomic():
            broadcast("a.b")
    finally:
        Forbidding.doClassCleanups()
    assert QueuedMessage.objects.count() == 4


@pytest.mark.parametrize("threshold", [None, 1])
def test_a_connection_of_another_thread_is_refused(threshold: int | None) -> None:
    """As by Django: `connections` gives each thread its own."""
    with connection.cursor():
        driver().prepare_threshold = threshold
    mine = connections[connection.alias]
    refused: list[DatabaseError] = []

    def use() -> None:
        try:
            with preparing.own_cursor(mine):
                pass
        except DatabaseError as error:
            refused.append(error)

    other = threading.Thread(target=use)
    other.start()
    other.join()
    assert "same thread" in str(refused)


@pytest.mark.parametrize("broken", ["queue = 'a b'", "type = ''"])
def test_what_the_server_refuses_is_djangos_error(broken: str) -> None:
    column, _, value = broken.partition(" = ")
    row = NewRow("q", "a.b", "{}", 20)._replace(**{column: value.strip("'")})
    for _ in range(9):
        writer = RowWriter(connection, get_settings(), RowBuilder(get_settings()))
        with pytest.raises(IntegrityError, match="name"), transaction.atomic():
            writer.insert([row])
    assert not QueuedMessage.objects.exists()


def test_it_stays_prepared_after_an_error() -> None:
    """A lock timeout, say: the statement is on the server still, and not to be prepared again."""
    send(5)
    for _ in range(3):
        with second_connection() as other:
            other.execute("begin; lock table django_mq_queuedmessage")
            with connection.cursor() as cursor:
                cursor.execute("set lock_timeout = '10ms'")
            with pytest.raises(DatabaseError, match="lock timeout"):
                send(1)
        send(3)
    assert prepared() == 1
    assert QueuedMessage.objects.count() == 14


def test_a_session_in_another_encoding() -> None:
    send(5)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("set local client_encoding to 'LATIN1'")
        broadcast("a.b", {"text": "caf\u00e9"})
    assert QueuedMessage.objects.get(payload__text="caf\u00e9")


@pytest.mark.parametrize("threshold", [None, 5])
def test_a_broken_transaction_is_said_by_django_before_any_sql(threshold: int | None) -> None:
    with transaction.atomic():
        send(3)
        driver().prepare_threshold = threshold
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            broadcast("a.b")
    assert not QueuedMessage.objects.exists()


def test_a_table_that_changed_meanwhile() -> None:
    send(5)
    with connection.cursor() as cursor:
        cursor.execute("alter table django_mq_queuedmessage add column more int default 3")
    try:
        send(2)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("alter table django_mq_queuedmessage drop column more")
    send(1)
    assert QueuedMessage.objects.count() == 8
