"""S04: every column for names contains only names, and compares them by their bytes."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.db import IntegrityError, connection, transaction
from django.db.models import CharField
from psycopg.errors import CheckViolation

from django_mq.store import free_unique_ids, promotion, put_aside, unique_ids
from tests.rows import add, beat, decide

#: Text for people, or names given by Python or the system.
NO_NAMES = {
    "host",
    "version",
    "wakeup",
    "cron",
    "tz",
    "catch_up",
    "overlap",
    "source",
    "action",
    "state",
}
#: Keys and unique ids may be any text without control characters.
FREE = {"key", "unique_id"}
#: A claimer is only compared, and copied to the attempts; a correlation id comes from metadata.
UNCHECKED = {"claimed_by", "unstarted_claim", "worker", "correlation_id"}

COLUMNS = {
    (model._meta.db_table, field.column): field
    for model in apps.get_app_config("django_mq").get_models()
    for field in model._meta.concrete_fields
    if isinstance(field, CharField) and field.name not in NO_NAMES
}


@pytest.fixture
def rows(db: None) -> None:
    """A row in every table, with a name in every column that may have one."""
    add(leased=60, claimed_by="w:1", key="k", unique_id="u", handler="h")
    decide("q", owner="w", probe_by="w:1")
    beat("w")
    with connection.cursor() as cursor:
        cursor.execute(
            """
            insert into django_mq_failedattempt
                   (message_id, queue, type, handler, attempt, worker, error_class, error_text,
                    traceback)
            values (1, 'q', 't', 'h', 1, 'w', '', '', '');
            insert into django_mq_schedule (name, type, queue, every)
            values ('s', 't', 'q', '1 hour');
            insert into django_mq_handledmessage (id, queue, type, handler, key, keep_until)
            values (1, 'q', 't', 'h', 'k', now());
            insert into django_mq_result (message_id, handler) values (1, 'h');
            insert into django_mq_uniquekey (queue, handler, type, unique_id, put_aside)
            values ('q', 'h', 't', 'u', '{}');
            insert into django_mq_minutefigures (minute, worker, queue, handler)
            values ('2020-01-01', 'w', 'q', 'h');
            insert into django_mq_hourfigures (hour, queue, handler)
            values ('2020-01-01', 'q', 'h')
            """
        )


def is_refused(table: str, column: str, value: str) -> bool:
    """Return whether a check constraint keeps the value out of the column."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f'update {table} set "{column}" = %s', [value])
    except IntegrityError as error:
        return isinstance(error.__cause__, CheckViolation)
    return False


@pytest.mark.usefixtures("rows")
def test_nothing_but_names_fits() -> None:
    """A put-aside message becomes a message, and a bad one would stop the others."""
    with connection.cursor() as cursor:
        for (table, column), field in COLUMNS.items():
            if field.name in UNCHECKED:
                continue
            for name in ("a\n", "\x7f", *(() if field.name in FREE else ("a b", "ü", 'a"', " "))):
                assert is_refused(table, column, name), f"{table}.{column} takes {name!r}"
            cursor.execute(f"""update {table} set "{column}" = 'A-z_0.9:/x'""")
            assert cursor.rowcount == 1, (table, column)


@pytest.mark.usefixtures("rows")
def test_a_name_that_must_be_there_is_not_empty() -> None:
    with connection.cursor() as cursor:
        for (table, column), field in COLUMNS.items():
            if not field.blank and field.name not in UNCHECKED:
                with pytest.raises(IntegrityError), transaction.atomic():
                    cursor.execute(f"""update {table} set "{column}" = ''""")


@pytest.mark.django_db
def test_they_are_compared_by_their_bytes() -> None:
    """Python sorts by bytes, and a new version of the system's locale breaks no index."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            select c.relname, a.attname, l.collname
              from pg_attribute a
              join pg_class c on c.oid = a.attrelid
              join pg_collation l on l.oid = a.attcollation
             where c.relname like 'django_mq_%' and c.relkind in ('r', 'p')
            """
        )
        found = {(table, column): name for table, column, name in cursor.fetchall()}
    assert {column: found[column] for column in COLUMNS} == dict.fromkeys(COLUMNS, "C")


@pytest.mark.django_db
def test_statements_lock_unique_ids_in_the_order_of_the_columns() -> None:
    """Parameters have the database's collation, in which `B` may come after `a`."""
    one = unique_ids.columns([unique_ids.UniqueId("q", "h", "t", "u")])
    done = {**one, "message_ids": [1], "successes": [True]}
    statements = {
        unique_ids.ADD: {"rows": "[]"},
        put_aside.PUT_ASIDE: {"rows": "[]"},
        free_unique_ids.FREE: done,
        promotion.LOCK: one,
        promotion.PROMOTE_PUT_ASIDE: {**one, "ring": True},
        free_unique_ids.REACQUIRE: {"ids": [1]},
    }
    with connection.cursor() as cursor:
        for statement, params in statements.items():
            cursor.execute("explain (verbose, costs off) " + statement, params)
            lines = [line for (line,) in cursor.fetchall() if "Sort Key:" in line]
            assert lines, statement
            for line in lines:
                keys = line.partition("Sort Key: ")[2].split(", ")
                assert all('COLLATE "C"' in key or key.endswith("id DESC") for key in keys), line
