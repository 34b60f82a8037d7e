"""Inserting rows: three ways, one result."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from psycopg import sql

from django_mq.models import QueuedMessage
from django_mq.store import cancel
from django_mq.store import insert as insert_module
from django_mq.store.insert import (
    INSERT_FEW,
    MAX_INSERT_ROWS,
    MAX_VALUES_ROWS,
    as_json,
    copy_many,
    draw,
    insert,
)
from django_mq.store.rows import NewRow, Rows
from tests.database import second_connection

pytestmark = pytest.mark.django_db

Insert = Callable[[Any, list[NewRow]], list[int]]
AT = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
FIXED = {"kind": "fixed", "seconds": 5.0}
FULL = NewRow(
    queue="mail",
    type="shop.orders.placed",
    payload='{"a": [1, "Zo\\u00eb", "tab\\tback\\\\slash", null]}',
    max_attempts=7,
    handler="shop.handlers.send",
    schema_version=3,
    metadata='{"tier": "gold"}',
    priority=-100,
    key="order/1",
    retry=json.dumps(FIXED),
    wants_result=True,
    due=AT,
    expires=AT + timedelta(days=1),
)
PLAIN = NewRow(queue="mail", type="a.b", payload="{}", max_attempts=20)


def one_by_one(cursor: Any, rows: list[NewRow]) -> list[int]:
    return [insert(cursor, Rows([row]))[0] for row in rows]


def insert_few(cursor: Any, rows: Sequence[NewRow]) -> list[int]:
    """The path of `insert()` for more than MAX_VALUES_ROWS rows, including a single one."""
    cursor.execute(INSERT_FEW, (f"[{','.join(map(as_json, rows))}]",))
    return sorted(id for id, _ in cursor.fetchall())


def copy_rows(cursor: Any, rows: Sequence[NewRow]) -> list[int]:
    return copy_many(cursor, Rows(rows))


@pytest.fixture(params=[one_by_one, insert_few, copy_rows], ids=lambda each: each.__name__)
def way(request: Any) -> Insert:
    return request.param  # type: ignore[no-any-return]


@contextmanager
def djangos() -> Iterator[Any]:
    with connection.cursor() as cursor:
        yield cursor


@contextmanager
def drivers() -> Iterator[Any]:
    with (
        second_connection() as other,
        other.transaction(force_rollback=True),
        other.cursor() as cursor,
    ):
        yield cursor


@pytest.mark.parametrize("cursors", [djangos, drivers])
def test_every_column_arrives(way: Insert, cursors: Callable[[], Any]) -> None:
    """PMQ-1, PMQ-2, RMQ-3: with a cursor of Django and with one of the driver."""
    with cursors() as cursor:
        (id,) = way(cursor, [FULL])
        cursor.execute(
            """
            select queue, type, payload->'a'->>2, max_attempts, handler, schema_version,
                metadata->>'tier', priority, key, retry->>'kind', wants_result,
                processable_after = %s, expires_at = %s, created_at <= clock_timestamp(),
                attempts, leased_until, claimed_by, dead_at
            from django_mq_queuedmessage where id = %s
            """,
            (AT, AT + timedelta(days=1), id),
        )
        assert cursor.fetchone() == (
            "mail", "shop.orders.placed", "tab\tback\\slash", 7, "shop.handlers.send", 3,
            "gold", -100, "order/1", "fixed", True,
            True, True, True,
            0, None, None, None,
        )  # fmt: skip


def test_omitted_columns_have_defaults(way: Insert) -> None:
    with connection.cursor() as cursor:
        (id,) = way(cursor, [PLAIN])
    message = QueuedMessage.objects.get(pk=id)
    assert (message.handler, message.schema_version, message.priority) == ("", 1, 0)
    assert (message.metadata, message.key, message.retry) == ({}, None, None)
    assert (message.wants_result, message.expires_at) == (False, None)
    assert message.processable_after == message.created_at


@pytest.mark.parametrize(
    ("count", "statements"),
    [(MAX_VALUES_ROWS, 1), (MAX_VALUES_ROWS + 1, 1), (MAX_INSERT_ROWS + 1, 2)],
)
def test_rows_that_set_different_columns_share_a_statement(
    django_assert_num_queries: Any, count: int, statements: int
) -> None:
    later = PLAIN._replace(delay=90.5, metadata='{"tier": "gold"}')
    rows = [FULL, later, *[PLAIN] * (count - 2)]
    with django_assert_num_queries(statements), connection.cursor() as cursor:
        insert(cursor, Rows(rows))
    full, delayed, *plain = QueuedMessage.objects.order_by("id")
    assert (full.key, full.retry, full.wants_result) == ("order/1", FIXED, True)
    assert (full.processable_after, full.expires_at) == (FULL.due, FULL.expires)
    assert delayed.processable_after - delayed.created_at == timedelta(seconds=90.5)
    assert (delayed.metadata, delayed.schema_version) == ({"tier": "gold"}, 1)
    assert len(plain) == count - 2
    for each in plain:
        assert (each.key, each.retry, each.metadata, each.priority) == (None, None, {}, 0)
        assert (each.processable_after, each.expires_at) == (each.created_at, None)


def test_seconds_count_from_the_databases_clock(way: Insert) -> None:
    """RMQ-13, PMQ-8, guarantee 9."""
    with connection.cursor() as cursor:
        (id,) = way(cursor, [PLAIN._replace(delay=90.5, lifetime=3600.0)])
    message = QueuedMessage.objects.get(pk=id)
    assert message.processable_after - message.created_at == timedelta(seconds=90.5)
    assert message.expires_at is not None
    assert message.expires_at - message.created_at == timedelta(hours=1)


def test_the_clock_moves_within_a_transaction(way: Insert) -> None:
    """`now()` stands still there: a late broadcast would be due too early."""
    with connection.cursor() as cursor:
        cursor.execute("select now()")
        (begun,) = cursor.fetchone()
        (id,) = way(cursor, [PLAIN])
        cursor.execute("select clock_timestamp()")
        (ended,) = cursor.fetchone()
    assert begun < QueuedMessage.objects.get(pk=id).processable_after < ended


@pytest.mark.parametrize("zone", [True, False], ids=["USE_TZ", "naive"])
def test_copy_reads_the_clock_rightly_whatever_the_time_zone(settings: Any, zone: bool) -> None:
    settings.USE_TZ = zone
    settings.TIME_ZONE = "Asia/Tokyo"
    with connection.cursor() as cursor:
        cursor.execute("set local timezone to 'America/New_York'")
        (id,) = copy_rows(cursor, [PLAIN._replace(delay=3600.0)])
        cursor.execute(
            """
            select processable_after - clock_timestamp() between '59 min' and '60 min'
            from django_mq_queuedmessage where id = %s
            """,
            (id,),
        )
        assert cursor.fetchone() == (True,)


def test_ids_are_those_of_the_rows_in_their_order(way: Insert) -> None:
    rows = [PLAIN._replace(payload=str(number), priority=number % 7) for number in range(200)]
    with connection.cursor() as cursor:
        ids = way(cursor, rows)
    assert ids == sorted(set(ids))
    found = dict(QueuedMessage.objects.values_list("id", "payload"))
    assert [found[id] for id in ids] == list(range(200))


def test_large_rows_survive(way: Insert) -> None:
    text = "x" * 2**20
    with connection.cursor() as cursor:
        (id,) = way(cursor, [PLAIN._replace(payload=f'"{text}"')])
    assert QueuedMessage.objects.get(pk=id).payload == text


@pytest.mark.parametrize(
    ("count", "statements"),
    [(0, 0), (1, 1), (2, 1), (MAX_INSERT_ROWS, 1), (MAX_INSERT_ROWS + 1, 2)],
)
def test_the_way_follows_the_number_of_rows(
    count: int, statements: int, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(statements), connection.cursor() as cursor:
        assert len(insert(cursor, Rows([PLAIN] * count))) == count
    assert QueuedMessage.objects.count() == count


def test_ids_that_copy_drew_are_not_drawn_again() -> None:
    with connection.cursor() as cursor:
        copied = copy_rows(cursor, [PLAIN] * 3)
        assert insert(cursor, Rows([PLAIN]))[0] > copied[-1]


def test_ids_are_drawn_in_a_transaction_that_has_an_id() -> None:
    """Else the row gets its transaction later, when others have handled what lies behind it."""
    for _ in range(2):  # each 32nd id is drawn so in any case
        with second_connection() as other, other.transaction(), other.cursor() as cursor:
            draw(cursor, 1)
            cursor.execute("select pg_current_xact_id_if_assigned() is not null")
            assert cursor.fetchone() == (True,)


def test_the_store_names_columns_that_the_model_has() -> None:
    table = QueuedMessage._meta.db_table
    columns = {field.column for field in QueuedMessage._meta.concrete_fields}
    for statement in (INSERT_FEW, insert_module.COPY):
        target = re.search(r"(?:insert into|copy) (\w+) \(([^)]*)\)", statement)
        assert target is not None
        assert target[1] == table
        assert set(re.findall(r"\w+", target[2])) <= columns
    assert table in insert_module.DRAW
    assert set(re.findall(r"m\.(\w+)", cancel.CANCEL)) <= columns
    assert set(NewRow._fields) - columns == {"due", "delay", "expires", "lifetime"}


def test_statements_take_values_as_parameters_alone() -> None:
    """S05: a value that looks like SQL stays a value."""
    evil = PLAIN._replace(payload='"\'; drop table django_mq_queuedmessage; --"')
    with connection.cursor() as cursor:
        ids = [*one_by_one(cursor, [evil]), *insert_few(cursor, [evil]), *copy_rows(cursor, [evil])]
    assert set(QueuedMessage.objects.filter(pk__in=ids).values_list("payload", flat=True)) == {
        "'; drop table django_mq_queuedmessage; --"
    }


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("queue", "no spaces"),
        ("type", "no spaces"),
        ("handler", "no spaces"),
        ("key", "no\x07bell"),
        ("unique_id", "no\x85line"),
    ],
)
def test_the_table_itself_refuses_bad_names(column: str, name: str) -> None:
    """S04: other programs also write rows."""
    statement = sql.SQL("insert into django_mq_queuedmessage ({}) values ({})")
    columns = {"queue": "q", "type": "t", "payload": "{}", column: name}
    with second_connection() as other, pytest.raises(Exception, match=f"mq_{column}_name"):
        other.execute(
            statement.format(
                sql.SQL(",").join(map(sql.Identifier, columns)),
                sql.SQL(",").join(sql.Placeholder() * len(columns)),
            ),
            list(columns.values()),
        )
