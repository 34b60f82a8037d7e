"""Vacuum options of the short-lived tables: set with the tables, then left to the DBA."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection

Cursor = psycopg.Cursor[Any]

HOT = ["django_mq_queuedmessage", "django_mq_uniquekey"]
OTHERS = [
    "django_mq_failedattempt",
    "django_mq_hourfigures",
    "django_mq_minutefigures",
    "django_mq_queuestate",
    "django_mq_result",
    "django_mq_workerheartbeat",
]
OPTIONS = {
    "autovacuum_vacuum_scale_factor=0",
    "autovacuum_vacuum_threshold=20000",
    "autovacuum_vacuum_cost_delay=0",
    "vacuum_truncate=false",
}

FILL = """
insert into django_mq_queuedmessage (queue, type, payload)
select 'mail', 'shop.orders.placed', '{}' from generate_series(1, 1000)
"""


def options(table: str) -> tuple[set[str], set[str]]:
    """Return the storage parameters of a table, and those of its TOAST table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select coalesce(t.reloptions, '{}'), coalesce(toast.reloptions, '{}')"
            "  from pg_class t left join pg_class toast on toast.oid = t.reltoastrelid"
            " where t.oid = %s::regclass",
            [table],
        )
        own, toast = cursor.fetchone()
    return set(own), set(toast)


@pytest.mark.django_db
@pytest.mark.parametrize("table", HOT)
def test_short_lived_tables_are_vacuumed_by_a_number_of_rows(table: str) -> None:
    assert options(table) == (OPTIONS, {"vacuum_truncate=false"})


@pytest.mark.django_db
@pytest.mark.parametrize("table", OTHERS)
def test_other_tables_are_vacuumed_as_the_server_does(table: str) -> None:
    assert options(table) == (set(), set())


@pytest.mark.django_db
def test_it_can_be_taken_back_and_done_again() -> None:
    migration = import_module("django_mq.migrations.0001_initial")
    with connection.cursor() as cursor:
        for statement in migration.RESET_VACUUM:
            cursor.execute(statement)
        assert [options(table) for table in HOT] == [(set(), set())] * 2
        for statement in migration.SET_VACUUM:
            cursor.execute(statement)
    assert [options(table) for table in HOT] == [(OPTIONS, {"vacuum_truncate=false"})] * 2


@pytest.mark.django_db
def test_options_set_by_a_dba_are_kept() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "alter table django_mq_queuedmessage set (autovacuum_vacuum_threshold = 500)"
        )
    call_command("migrate", "django_mq", verbosity=0)
    assert "autovacuum_vacuum_threshold=500" in options("django_mq_queuedmessage")[0]


@pytest.mark.django_db(transaction=True)
def test_an_emptied_queue_keeps_its_pages_unless_asked(cursor: Cursor) -> None:
    """Returning them takes an ACCESS EXCLUSIVE lock: only by hand."""

    def size() -> int:
        cursor.execute("select pg_relation_size('django_mq_queuedmessage')")
        return int(cursor.fetchone()[0])  # type: ignore[index]

    cursor.execute(FILL)
    full = size()
    cursor.execute("delete from django_mq_queuedmessage")
    cursor.execute("vacuum django_mq_queuedmessage")
    assert size() == full
    cursor.execute("vacuum (truncate) django_mq_queuedmessage")
    assert size() == 0
