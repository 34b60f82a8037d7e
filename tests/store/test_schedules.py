"""Ten thousand schedules cost only their index, counted in pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, connection, transaction

from django_mq.executor.statements import ONE_PLAN
from django_mq.models import Schedule
from django_mq.store import schedules
from tests.store.plans import generic_plan, plan, touched_pages

pytestmark = pytest.mark.django_db(transaction=True)

MANY = """
insert into django_mq_schedule (name, type, every, next_at)
select 's' || n, 'shop.ping', '1 hour', statement_timestamp() + n * interval '1 second'
  from generate_series(%s::int, %s::int) n
"""
NOW = {
    "until": None,
    "after_at": schedules.FIRST[0],
    "after_name": schedules.FIRST[1],
    "cron": True,
    "own": None,
    "limit": 50,
}


def _pages(cursor: psycopg.Cursor[Any]) -> tuple[int, int]:
    """Return the numbers of pages that the look and the turn touch."""
    look = touched_pages(cursor, schedules.NEXT_DUE, {"cron": True})
    return look, touched_pages(cursor, schedules.TAKE_DUE, NOW)


def test_the_look_of_an_idle_worker_and_a_turn_do_not_grow(cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(ONE_PLAN)
    cursor.execute(MANY, (60, 159))
    before = _pages(cursor)
    cursor.execute(MANY, (160, 10_059))
    cursor.execute("vacuum analyze django_mq_schedule")
    after = _pages(cursor)
    assert max(after) <= max(before) + 2, (before, after)  # the index is a level deeper


def test_next_due_skips_disabled_schedules(cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(ONE_PLAN)
    cursor.execute(MANY, (1, 5000))
    cursor.execute("update django_mq_schedule set next_at = null, enabled = false")
    cursor.execute("vacuum analyze django_mq_schedule")
    assert touched_pages(cursor, schedules.NEXT_DUE, {"cron": True}) <= 2
    assert schedules.next_due(cursor) is None


def test_plans_of_an_empty_table_use_the_index(cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("set enable_seqscan = off; set enable_bitmapscan = off")
    for found in (
        plan(cursor, schedules.NEXT_DUE, cron=True),
        generic_plan(cursor, schedules.TAKE_DUE, **NOW),
    ):
        assert re.search("Index (Only )?Scan using mq_schedule_next", found), found


def test_next_due_is_the_earliest(cursor: psycopg.Cursor[Any]) -> None:
    assert schedules.next_due(cursor) is None
    cursor.execute(MANY, (100, 110))
    found = schedules.next_due(cursor)
    assert found is not None
    assert 90 < found <= 100
    cursor.execute("update django_mq_schedule set next_at = '2026-01-01' where name = 's105'")
    found = schedules.next_due(cursor)
    assert found is not None
    assert found < 0


def test_taken_in_order_from_a_position(cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(MANY, (1, 6))
    cursor.execute("update django_mq_schedule set next_at = '2026-01-01'")
    cursor.execute("update django_mq_schedule set next_at = '2025-01-01' where name = 's3'")
    first = schedules.take_due(cursor, limit=3)
    assert [each.name for each in first] == ["s3", "s1", "s2"]
    assert first[0].due_at == datetime(2025, 1, 1, tzinfo=UTC)
    rest = schedules.take_due(cursor, limit=9, after=(first[-1].due_at, first[-1].name))
    assert [each.name for each in rest] == ["s4", "s5", "s6"]
    until = datetime(2025, 6, 1, tzinfo=UTC)
    assert [each.name for each in schedules.take_due(cursor, limit=9, until=until)] == ["s3"]


@pytest.mark.parametrize(
    "row",
    [
        {"name": "a name"},
        {"name": ""},
        {"type": "shop.*"},
        {"queue": "a b"},
        {"cron": "* * * * *"},
        {"every": None},
        {"every": "0.5 s"},
        {"every": "-1 h"},
        {"every": "200 years"},
        {"enabled": False, "next_at": "2026-01-01"},
        {"next_at": "infinity"},
        {"last_at": "1800-01-01"},
        {"catch_up": "twice"},
        {"overlap": "never"},
        {"source": "sql"},
        {"expires": "-1 s"},
        {"metadata": "[]"},
    ],
    ids=str,
)
def test_rows_that_the_table_refuses(row: dict[str, Any], transactional_db: None) -> None:
    values = {"name": "s", "type": "shop.ping", "every": "1 hour", **row}
    names, marks = ", ".join(values), ", ".join(["%s"] * len(values))
    insert = f"insert into django_mq_schedule ({names}) values ({marks})"
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as own:
        own.execute(insert, list(values.values()))
    assert not Schedule.objects.exists()
