"""Findings about the tables and the database: D002 to D004, D021 to D023, D029 and D030."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from django.test import override_settings
from django.utils import timezone

from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    Result,
)
from django_mq.queues.doctor import examine, schema
from django_mq.queues.doctor.findings import own_tables
from django_mq.store import server_facts, session_facts
from tests.queues.doctor.examined import found, run
from tests.roles import acting_as, documented, make_role, skip_unless_able
from tests.rows import add
from tests.slow import slow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


def test_d002_unapplied_migrations() -> None:
    newest = schema.MigrationExecutor(connection).loader.graph.leaf_nodes("django_mq")[0][1]
    MigrationRecorder(connection).record_unapplied("django_mq", newest)
    (text,) = found("D002")
    assert newest in text


@pytest.mark.parametrize("table", [own_tables()[0], *slow(*own_tables()[1:])])
def test_d002_a_table_that_is_missing(table: str) -> None:
    run(f"drop table {table} cascade")
    (text,) = found("D002")
    assert text.startswith(
        f"Migrations are recorded as applied, but these tables do not exist: {table}. "
    )
    assert "Restore them" in text
    assert found("D001") == []


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_d002_a_router_refused_all_tables(empty_database: None) -> None:
    """migrate records migrations all the same; the hint creates the tables."""
    with override_settings(DATABASE_ROUTERS=[Refuses()]):
        call_command("migrate", "django_mq", verbosity=0)
    (finding,) = examine()
    assert finding.id == "D002"
    assert all(table in finding.text for table in own_tables())
    assert "accept django_mq there" in finding.hint
    commands = re.findall(r"manage\.py (migrate .+?)(?: and |\.$)", finding.hint)
    assert len(commands) == 2
    for command in commands:
        call_command(*command.split(), verbosity=0)
    assert examine() == []


@pytest.fixture
def empty_database(transactional_db: None) -> Iterator[None]:
    """Let the alias default lead to an empty database."""
    name = f"{connection.settings_dict['NAME']}_empty"[:63]
    run(f"create database {name} template template0")
    connection.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", name)
        yield
        connection.close()
    run(f"drop database {name} with (force)")


class Refuses:
    """A router that keeps all tables from every database."""

    def allow_migrate(self, *_: Any, **__: Any) -> bool:
        return False


def test_a_table_of_two_models_is_named_once() -> None:
    tables = own_tables()
    assert sorted(set(tables)) == sorted(tables)


class TestD003Indexes:
    def test_missing(self) -> None:
        run("drop index mq_claim")
        (text,) = found("D003")
        assert "mq_claim of django_mq_queuedmessage is missing" in text

    def test_invalid(self) -> None:
        skip_unless_able()
        run("update pg_index set indisvalid = false where indexrelid = 'mq_lease'::regclass")
        (text,) = found("D003")
        assert "mq_lease of django_mq_queuedmessage is invalid" in text


class TestD004Rights:
    def test_missing(self) -> None:
        role = make_role("mq_doctor_test", "grant select on django_mq_queuedmessage to {role}")
        with acting_as(role):
            (text,) = found("D004")
        assert "delete, insert, update on django_mq_queuedmessage" in text
        assert "usage on django_mq_queuedmessage_id_seq" in text

    def test_the_documented_role_of_workers_has_them(self) -> None:
        skip_unless_able()
        for block in documented():
            run(block)
        with acting_as("mq_worker"):
            assert list(schema.rights("default")) == []


def test_d030_row_security_that_hides_messages() -> None:
    """Without a policy for its login, a worker sees no message, and no statement fails."""
    run("alter table django_mq_queuedmessage enable row level security")
    assert found("D030") == []  # it does not apply to the owner
    role = make_role("mq_test_worker", "grant select on all tables in schema public to {role}")
    with acting_as(role):
        (text,) = found("D030")
    assert "Row-level security applies to this login on django_mq_queuedmessage:" in text


def record_failure(message_id: int) -> None:
    """Insert a failed attempt of a message, with the next id."""
    FailedAttempt.objects.create(
        message_id=message_id, queue="q", type="t", handler="h", attempt=1, worker="w"
    )


class TestD029Sequences:
    def test_a_sequence_behind_the_highest_id(self) -> None:
        """A switch to a logical replica leaves this, and the hint mends it."""
        message = add(after=60).id
        record_failure(message)
        assert found("D029") == []
        run("select setval(pg_get_serial_sequence('django_mq_failedattempt', 'id'), 1, false)")
        FailedAttempt.objects.update(id=7)
        (text,) = found("D029")
        assert "next id of django_mq_failedattempt is 1, but ids up to 7 are in use" in text
        [mend] = re.findall(r"select setval.*?\)(?=;)", text)
        run(mend)
        assert found("D029") == []
        record_failure(message)
        assert FailedAttempt.objects.filter(id=8).exists()

    @pytest.mark.parametrize("table", ["queuedmessage", "result", "handledmessage", "attempt"])
    def test_ids_of_messages_that_have_ended(self, table: str) -> None:
        """No row is refused, but a new message has the id, and so the result, of an earlier one."""
        last = add(after=60).id
        ended = {
            "queuedmessage": lambda: add(id=last + 1),
            "result": lambda: Result.objects.create(message_id=last + 1, value={}),
            "handledmessage": lambda: HandledMessage.objects.create(
                id=last + 1, queue="q", type="t", keep_until=timezone.now()
            ),
            "attempt": lambda: record_failure(last + 1),
        }
        ended[table]()
        (text,) = found("D029")
        assert f"ids up to {last + 1:,} are in use" in text
        assert "next id of django_mq_queuedmessage" in text

    def test_a_sequence_that_was_moved_and_has_given_no_id_since(self) -> None:
        """The statement of the hint would move it back."""
        add(after=60)
        run("alter table django_mq_queuedmessage alter column id restart with 1000000")
        assert found("D029") == []
        assert add(after=60).id == 1000000
        assert found("D029") == []

    def test_a_sequence_that_gave_the_highest_id(self) -> None:
        add(after=60)
        assert found("D029") == []


def test_d021_an_encoding_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("D021") == []
    monkeypatch.setattr(server_facts, "encoding", lambda _: "LATIN1")
    (text,) = found("D021")
    assert "encoding is LATIN1" in text


def test_d022_read_only_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("D022") == []
    with connection.cursor() as cursor:
        cursor.execute("set local default_transaction_read_only = on")
    (text,) = found("D022")
    assert "default_transaction_read_only" in text
    monkeypatch.setattr(server_facts, "read_only", lambda _: (True, False))
    (text,) = found("D022")
    assert "standby" in text
    assert "Other findings may be out of date" in text
    monkeypatch.setattr(session_facts, "notify_arrives", lambda *_, **__: False)
    assert found("D010") == []  # a standby hears nothing, but D022 says it all


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("DateStyle = German", "DateStyle of this login is 'German"),
        ("extra_float_digits = -3", "extra_float_digits of this login is -3"),
        ("array_nulls = off", "array_nulls of this login is off"),
    ],
)
def test_d023_formats_that_cannot_be_read(setting: str, told: str) -> None:
    assert found("D023") == []
    run(f"set local {setting}")
    (text,) = found("D023")
    assert told in text


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("max_age", [0, None])
def test_d023_comes_before_the_checks_that_fail_for_it(
    max_age: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**connection.settings_dict["OPTIONS"], "options": "-c DateStyle=German"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age)
    connection.close()
    first, second, *_ = examine()
    connection.close()
    assert first.id == "D023"
    assert second.text.startswith("Could not look at migrations: ")


@pytest.mark.django_db(transaction=True)
def test_a_worker_names_a_date_style_that_the_driver_cannot_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**connection.settings_dict["OPTIONS"], "options": "-c DateStyle=German"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    with pytest.raises(CommandError, match="The DateStyle of this login is 'German"):
        call_command("mq_worker", "--until-empty")
