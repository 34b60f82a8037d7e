"""Statements of producers that the server keeps prepared, and where it must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction
from django.db.transaction import TransactionManagementError

from django_mq import broadcast, handlers
from django_mq.models import QueuedMessage
from django_mq.preparing import own_cursor

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


def test_what_is_said_often_is_prepared() -> None:
    send(1)
    assert prepared() == 0
    send(4)
    assert prepared() == 1
    assert QueuedMessage.objects.count() == 5


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


def test_the_callers_own_statements_are_prepared_as_before() -> None:
    with transaction.atomic():
        before = driver().prepare_threshold
        broadcast("a.b")
        assert driver().prepare_threshold == before
        with pytest.raises(DatabaseError), transaction.atomic():  # noqa: SIM117
            with connection.wrap_database_errors, own_cursor(connection) as cursor:
                cursor.execute("select 1 / 0")
        assert driver().prepare_threshold == before
        broadcast("a.b")
    assert QueuedMessage.objects.count() == 2


def test_a_broken_transaction_is_said_by_django_before_any_sql() -> None:
    with transaction.atomic():
        send(3)
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
