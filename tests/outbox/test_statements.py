"""Producers' statements go through Django's cursor, however the connection is set up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, connection, transaction
from django.db.transaction import TransactionManagementError
from django.test import SimpleTestCase
from django.test.testcases import DatabaseOperationForbidden
from django.utils import timezone

from django_mq import Message, RetryPolicy, broadcast, broadcast_many, handlers
from django_mq.models import QueuedMessage
from django_mq.outbox import notify
from django_mq.outbox.build import RowBuilder
from django_mq.outbox.write import RowWriter
from django_mq.store.insert import MAX_VALUES_ROWS
from django_mq.store.rows import NewRow, Rows
from tests.database import second_connection

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A separate session, which no other test gets."""
    connection.close()
    with handlers.isolated():
        yield
    connection.close()


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias whose statements use server-side binding and prepared statements."""
    options = {
        **connection.settings_dict["OPTIONS"],
        "server_side_binding": True,
        "prepare_threshold": 1,
    }
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)


def driver() -> psycopg.Connection[Any]:
    found: psycopg.Connection[Any] = connection.connection
    return found


def send(count: int) -> None:
    with transaction.atomic():
        for _ in range(count):
            broadcast("a.b")


def send_every_shape() -> None:
    """Send a plain row, two with options (times, nulls, numbers), a document, and several rows."""
    due = timezone.now() + timedelta(days=1)
    with transaction.atomic():
        broadcast("a.b", {"text": "a 'quoted' \u20ac \\ text %s {}"})
        broadcast("a.b", after=due, expires=due + timedelta(hours=1), priority=-3, key="k")
        broadcast("a.b", after=1.5, metadata={"a": None}, retry=RetryPolicy(max_attempts=2))
        broadcast_many([Message("a.b", n, key="k") for n in range(MAX_VALUES_ROWS + 1)])
        broadcast_many([Message("a.b", n) for n in range(3)])
        broadcast_many([Message("a.b", n, priority=n) for n in range(3)])
    sent = QueuedMessage.objects.order_by("-pk")[: MAX_VALUES_ROWS + 10][::-1]
    plain, late, soon, *listed = sent[: MAX_VALUES_ROWS + 4]
    few = sent[MAX_VALUES_ROWS + 4 :]
    assert plain.payload == {"text": "a 'quoted' \u20ac \\ text %s {}"}
    assert (late.processable_after, late.expires_at) == (due, due + timedelta(hours=1))
    assert (late.priority, late.key, late.retry) == (-3, "k", None)
    assert soon.processable_after - soon.created_at == timedelta(seconds=1.5)
    assert (soon.metadata, soon.max_attempts) == ({"a": None}, 2)
    assert [(each.payload, each.key) for each in listed] == [
        (n, "k") for n in range(MAX_VALUES_ROWS + 1)
    ]
    assert [(each.payload, each.priority) for each in few] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 0),
        (1, 1),
        (2, 2),
    ]


def test_every_shape_of_a_few_rows() -> None:
    send_every_shape()


@pytest.mark.usefixtures("binding")
def test_every_shape_that_the_server_binds_and_prepares() -> None:
    for _ in range(3):
        send_every_shape()
    found = driver().execute(
        "select count(distinct statement) from pg_prepared_statements"
        " where statement like '%%insert into django_mq_queuedmessage%%'"
    )
    assert found.fetchone() == (6,)


def test_execute_wrappers_see_the_insert_and_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RING_INTERVAL", 0.0)
    seen: list[str] = []

    def see(execute: Any, sql: str, *others: Any) -> Any:
        seen.append(sql)
        return execute(sql, *others)

    for _ in range(4):
        send(1)
    with connection.execute_wrapper(see):
        send(1)
    insert, ring = seen
    assert "insert into django_mq_queuedmessage" in insert
    assert "notify django_mq" in ring


def test_a_replaced_cursor_sees_our_statements() -> None:
    """SimpleTestCase does this to forbid queries."""
    send(4)

    class Forbidding(SimpleTestCase):
        pass

    Forbidding.setUpClass()
    try:
        with pytest.raises(DatabaseOperationForbidden), transaction.atomic():
            broadcast("a.b")
    finally:
        Forbidding.doClassCleanups()
    assert QueuedMessage.objects.count() == 4


def test_the_isolation_level_of_the_alias_holds() -> None:
    with connection.cursor():
        driver().isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
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


def lose() -> None:
    """The server ends our session."""
    pid = driver().info.backend_pid
    with second_connection() as other:
        other.execute("select pg_terminate_backend(%s, 30000)", [pid])


def test_a_connection_that_is_lost_when_it_rings_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of a request Django checks the connections on which it saw an error."""
    monkeypatch.setattr(notify, "RING_INTERVAL", 0.0)
    with transaction.atomic():
        transaction.on_commit(lose)
        broadcast("a.b")
    assert connection.errors_occurred
    connection.close_if_unusable_or_obsolete()
    send(1)


def test_a_lost_connection_is_noticed_where_django_checks_it(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """CONN_HEALTH_CHECKS run before the first statement of a request; here that is a broadcast."""
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "REQUIRE_ATOMIC": False}
    send(4)
    lose()
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    monkeypatch.setattr(connection, "health_check_enabled", True)
    monkeypatch.setattr(connection, "health_check_done", False)
    broadcast("a.b")
    assert QueuedMessage.objects.count() == 5


@pytest.mark.parametrize("broken", ["queue = 'a b'", "type = ''"])
def test_refusal_of_the_server_is_djangos_error(broken: str) -> None:
    column, _, value = broken.partition(" = ")
    row = NewRow("q", "a.b", "{}", 20)._replace(**{column: value.strip("'")})
    writer = RowWriter(connection, RowBuilder("default").queues)
    with pytest.raises(IntegrityError, match="name"), transaction.atomic():
        writer.insert(Rows([row]))
    assert not QueuedMessage.objects.exists()


def test_a_session_in_another_encoding() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("set local client_encoding to 'LATIN1'")
        broadcast("a.b", {"text": "caf\u00e9"})
    assert QueuedMessage.objects.get(payload__text="caf\u00e9")


def test_broken_transaction_is_djangos_error_before_any_sql() -> None:
    with transaction.atomic():
        send(3)
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            broadcast("a.b")
    assert not QueuedMessage.objects.exists()
