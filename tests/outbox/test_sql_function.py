"""mq_broadcast: triggers and other services broadcast with it."""

from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from django_mq.models import QueuedMessage
from tests.database import listening, second_connection


def call(statement: str, *params: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.fetchone()[0]


@pytest.mark.django_db
def test_queue_and_type_are_enough() -> None:
    id = call("select mq_broadcast('mail', 'shop.orders.placed')")
    message = QueuedMessage.objects.get(pk=id)
    assert (message.queue, message.type, message.handler) == ("mail", "shop.orders.placed", "")
    assert (message.payload, message.metadata, message.schema_version) == ({}, {}, 1)
    assert (message.attempts, message.max_attempts, message.priority) == (0, 20, 0)
    assert message.processable_after <= message.created_at


@pytest.mark.django_db
def test_all_arguments_are_stored() -> None:
    at = datetime(2030, 1, 2, tzinfo=UTC)
    id = call("select mq_broadcast('q', 't', '[1]', '{\"tier\": \"gold\"}', %s)", at)
    message = QueuedMessage.objects.get(pk=id)
    assert (message.payload, message.metadata) == ([1], {"tier": "gold"})
    assert message.processable_after == at


@pytest.mark.django_db
def test_nulls_are_the_defaults() -> None:
    """The due time is never null."""
    id = call("select mq_broadcast('q', 't', null, null, null)")
    message = QueuedMessage.objects.get(pk=id)
    assert (message.payload, message.metadata) == ({}, {})
    assert message.processable_after is not None


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("queue", "type", "constraint"),
    [
        ("", "t", "mq_queue_name"),
        ("  ", "t", "mq_queue_name"),
        ("q", "os system", "mq_type_name"),
        ("q", "t\n", "mq_type_name"),
        ("q", "zoë", "mq_type_name"),
        (None, "t", "queue"),
        ("q", None, "type"),
    ],
)
def test_names_keep_the_one_rule(queue: str | None, type: str | None, constraint: str) -> None:
    """S04."""
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic():
        call("select mq_broadcast(%s, %s)", queue, type)
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("argument", ["queue", "type"])
def test_a_name_is_at_most_128_long(argument: str) -> None:
    names = {"queue": "q", "type": "t", argument: "x" * 128}
    assert call("select mq_broadcast(%s, %s)", *names.values())
    names[argument] += "x"
    with pytest.raises(Exception, match="too long"), transaction.atomic():
        call("select mq_broadcast(%s, %s)", *names.values())


@pytest.mark.django_db(transaction=True)
def test_it_rings_in_its_transaction() -> None:
    """PMQ-3."""
    with listening() as listener, second_connection() as other:
        with other.transaction():
            other.execute("select mq_broadcast('q', 't')")
            other.execute("select mq_broadcast('q', 't')")
            assert listener.heard() == []
        assert listener.heard() == [""]
        with other.transaction(force_rollback=True):
            other.execute("select mq_broadcast('q', 't')")
        assert listener.heard() == []
    assert QueuedMessage.objects.count() == 2


@pytest.mark.django_db
def test_a_trigger_can_broadcast() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            create table shop_orders (id integer primary key);
            create function announce() returns trigger language plpgsql as $$
            begin
                perform mq_broadcast('mail', 'shop.orders.placed', to_jsonb(new));
                return new;
            end $$;
            create trigger announce after insert on shop_orders
                for each row execute function announce();
            insert into shop_orders values (1), (2);
            """
        )
    found = QueuedMessage.objects.order_by("id").values_list("payload", flat=True)
    assert list(found) == [{"id": 1}, {"id": 2}]


HOSTILE = """
create schema hostile;
create table hostile.django_mq_queuedmessage (like public.django_mq_queuedmessage including all);
create function hostile.pg_notify(text, text) returns void language sql as 'select 1/0';
create function hostile.statement_timestamp() returns timestamptz
    language sql as 'select null::timestamptz';
set local search_path to hostile, pg_catalog;
"""


@pytest.mark.django_db
def test_the_callers_search_path_changes_nothing() -> None:
    """S21."""
    with connection.cursor() as cursor:
        cursor.execute(HOSTILE)
        cursor.execute("select public.mq_broadcast('q', 't')")
        cursor.execute("select count(*) from hostile.django_mq_queuedmessage")
        assert cursor.fetchone() == (0,)
        cursor.execute("select count(*) from public.django_mq_queuedmessage")
        assert cursor.fetchone() == (1,)
        cursor.execute("show search_path")
        assert cursor.fetchone() == ("hostile, pg_catalog",)


@pytest.mark.django_db
def test_a_temporary_table_of_the_caller_catches_nothing() -> None:
    """S21: the temporary schema is searched first unless the path says otherwise."""
    with connection.cursor() as cursor:
        cursor.execute(
            "create temporary table django_mq_queuedmessage"
            " (like public.django_mq_queuedmessage including all) on commit drop"
        )
        cursor.execute("select mq_broadcast('q', 't')")
        cursor.execute("select count(*) from public.django_mq_queuedmessage")
        assert cursor.fetchone() == (1,)


@pytest.mark.django_db
def test_it_runs_with_the_callers_rights() -> None:
    """S21: not SECURITY DEFINER."""
    assert call("select prosecdef from pg_proc where proname = 'mq_broadcast'") is False


@pytest.mark.django_db
def test_a_migration_replaces_it_where_it_is() -> None:
    """Also where the search path begins with another schema, where it would find no table."""
    migration = import_module("django_mq.migrations.0014_function_of_table").Migration
    with connection.cursor() as cursor:
        cursor.execute("create schema tenant; set local search_path to tenant, public")
        for each in migration.operations:
            cursor.execute(each.sql)
        cursor.execute(
            "select pronamespace::regnamespace::text, proconfig from pg_proc"
            " where proname = 'mq_broadcast'"
        )
        assert cursor.fetchall() == [("public", ["search_path=public, pg_temp"])]


@pytest.mark.django_db
def test_it_is_dropped_with_its_table() -> None:
    """django-test-migrations drops the tables of all models, and migrates again."""
    with connection.cursor() as cursor:
        cursor.execute("drop table django_mq_queuedmessage cascade")
        cursor.execute("select count(*) from pg_proc where proname = 'mq_broadcast'")
        assert cursor.fetchone() == (0,)
