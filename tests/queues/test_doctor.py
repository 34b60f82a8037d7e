"""The findings of the doctor: each id is provoked on a real server."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.db.migrations.recorder import MigrationRecorder
from django.test import override_settings
from django.utils import timezone

from django_mq import handler, queues
from django_mq.conf.local_time import local_text
from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    MinuteFigures,
    QueuedMessage,
    Result,
    WorkerHeartbeat,
)
from django_mq.queues import doctor
from django_mq.queues.doctor import Finding, capacity, examine, links, schedules, schema, upkeep
from django_mq.queues.doctor.findings import own_tables
from django_mq.queues.transactions import reading
from django_mq.store import server_facts, session_facts
from django_mq.store.limits import Limits
from django_mq.store.oldest_snapshot import HorizonHolder
from django_mq.store.session_facts import LoginLimits
from django_mq.store.vacuum import Versions
from tests.database import second_connection
from tests.outbox.schedules.conftest import put
from tests.queues.pooler import Pooler
from tests.roles import acting_as, documented, make_role, skip_unless_able
from tests.rows import add, beat, decide
from tests.slow import slow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

Alias = Callable[..., str]


@pytest.fixture
def alias() -> Iterator[Alias]:
    """Make another alias of the test database, with some parameters changed."""
    made = []

    def make(name: str, **changed: Any) -> str:
        made.append(name)
        connections.databases[name] = {
            **copy.deepcopy(connection.settings_dict),
            **changed,
        }
        return name

    yield make
    for name in made:
        connections[name].close()
        del connections.databases[name]
        del connections[name]


def found(id: str) -> list[str]:
    """Return the findings with this id, of the checks in its module alone: all take 0.15 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "EXAMINATIONS", checks_for(id))
        return [f"{each.text} {each.hint}" for each in examine() if each.id == id]


def checks_for(id: str) -> tuple[Any, ...]:
    """Return the checks of the module that has the finding; all of them for a check that fails."""
    checks = doctor.EXAMINATIONS
    if id != "D001":
        sources = (inspect.getsource(sys.modules[check.__module__]) for _, check in checks)
        checks = tuple(
            each for each, source in zip(checks, sources, strict=True) if f'"{id}"' in source
        )
    assert checks, id
    return checks


def run(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def run_doctor(*options: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    out = StringIO()
    try:
        call_command("mq_doctor", *options, stdout=out, no_color=True)
    except SystemExit as end:
        return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


class TestTheCommand:
    def test_nothing_is_wrong(self) -> None:
        beat()
        add()
        text = (
            "No problem of the installation found. mq_errors and mq_status show what the handlers"
            " do.\n"
        )
        assert run_doctor() == (0, text)
        assert json.loads(run_doctor("--json")[1]) == {"findings": []}

    def test_the_exit_code_is_that_of_the_worst(self) -> None:
        add(after=60)
        code, text = run_doctor()
        assert (code, text.split()[:2]) == (1, ["D020", "warning"])
        run("drop index mq_line")
        code, text = run_doctor("--json")
        told = json.loads(text)["findings"]
        assert (code, [each["id"] for each in told]) == (2, ["D003", "D020"])
        assert set(told[0]) == {"id", "level", "text", "hint"}
        assert run_doctor("--ignore", "d003", "--ignore", "D020")[0] == 0

    def test_an_id_that_no_finding_has_is_an_error(self) -> None:
        with pytest.raises(CommandError, match="id D099, X: the ids are D001 to D033") as raised:
            run_doctor("--ignore", "d099", "--ignore", "D013", "--ignore", "x")
        assert raised.value.returncode == 2

    def test_a_bad_alias_is_an_error(self) -> None:
        with pytest.raises(CommandError, match="DATABASES has no 'x'") as raised:
            call_command("mq_doctor", "--database", "x")
        assert raised.value.returncode == 2


def test_d001_a_server_that_is_away() -> None:
    away = {**os.environ, "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing"}
    command = [sys.executable, "manage.py", "mq_doctor", "--json"]
    ended = subprocess.run(command, cwd=settings.BASE_DIR, env=away, stdout=subprocess.PIPE)
    assert ended.returncode == 2
    (finding,) = json.loads(ended.stdout)["findings"]
    assert finding["id"] == "D001"
    assert finding["text"].startswith("Database 'default' cannot be reached: ")
    assert finding["text"].endswith("The remaining checks did not run.")
    assert "connections? The remaining" in finding["text"]
    assert ".." not in finding["text"]
    assert "HOST, PORT, NAME, USER" in finding["hint"]


def test_d001_a_server_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was reached, so the finding does not blame the settings of the connection."""

    def broken(alias: str) -> Iterator[Finding]:
        run("do $$ begin raise disk_full; end $$")
        yield from ()

    monkeypatch.setattr(doctor, "EXAMINATIONS", (("the clocks", broken),))
    (finding,) = examine()
    assert "the clocks: disk_full" in finding.text
    assert finding.hint == "Correct what the text names, and run mq_doctor again."


@pytest.mark.django_db(transaction=True)
def test_d001_a_login_without_a_free_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the connection are right."""
    skip_unless_able()
    with second_connection() as admin:
        admin.execute("create role mq_doctor_full login connection limit 0 password 'x'")
        connection.close()
        try:
            with monkeypatch.context() as patch:
                patch.setitem(connection.settings_dict, "USER", "mq_doctor_full")
                patch.setitem(connection.settings_dict, "PASSWORD", "x")
                (finding,) = examine()
        finally:
            admin.execute("drop role mq_doctor_full")
    assert "too many connections" in finding.text
    assert finding.hint.startswith("All connections are taken: lower --processes or --threads")


@pytest.mark.parametrize(
    ("limits", "reason", "hint"),
    [
        (Limits(5.0, 0.02), "lock timeout", "Another session holds a lock"),
        (Limits(0.1, 5.0), "statement timeout", "The server is busy"),
    ],
)
def test_d001_a_limit(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, reason: str, hint: str
) -> None:
    """The server was reached, so the finding does not blame the settings of the connection."""
    beat()
    monkeypatch.setattr(schedules, "short_cursor", partial(reading, limits=limits))
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_schedule")
        (late, failing) = [each for each in examine() if each.id == "D001"]
    text = f"Could not look at overdue schedules: canceling statement due to {reason}"
    assert late.text.startswith(text)
    assert failing.text.startswith("Could not look at failed schedules: ")
    assert late.hint.startswith(hint)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("max_age", [0, None])
def test_d001_the_next_check_runs(max_age: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's default closes a connection after use, which says nothing about the server."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age)
    connection.close()

    def broken(alias: str) -> Iterator[Finding]:
        run("do $$ begin raise disk_full; end $$")
        yield from ()

    def next_check(alias: str) -> Iterator[Finding]:
        run("select 1")
        yield Finding(id="D099", level="error", text="It ran.", hint="")

    checks = (("the clocks", broken), ("the next", next_check))
    monkeypatch.setattr(doctor, "EXAMINATIONS", checks)
    first, second = examine()
    assert (first.id, second.text) == ("D001", "It ran.")
    assert "did not run" not in first.text


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_last", [False, True])
def test_d001_a_server_that_goes_away(is_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(alias: str) -> Iterator[Finding]:
        monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connection.settings_dict, "PORT", 1)
        run("select pg_terminate_backend(pg_backend_pid())")
        yield from ()

    checks = (("the clocks", broken), ("the encoding", schema.encoding))
    monkeypatch.setattr(doctor, "EXAMINATIONS", checks[: 1 if is_last else 2])
    (finding,) = examine()
    assert finding.text.startswith("Could not look at the clocks: ")
    assert finding.text.endswith(" The remaining checks did not run.") != is_last


def test_d001_an_error_that_is_no_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(alias: str) -> Iterator[Finding]:
        raise ImproperlyConfigured("SOME_SETTING is missing")

    monkeypatch.setattr(doctor, "EXAMINATIONS", (("the clocks", broken),))
    (finding,) = examine()
    assert finding.text == "Could not look at the clocks: SOME_SETTING is missing."
    assert "HOST" not in finding.hint


class TestErrorsThatOthersExplain:
    """A statement fails if a table, a column or a right is missing: D002 or D004 says which."""

    ERRORS = ("insufficient_privilege", "undefined_column", "undefined_table")

    @pytest.fixture(params=ERRORS, autouse=True)
    def broken(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(alias: str) -> Iterator[Finding]:
            run(f"do $$ begin raise {request.param}; end $$")
            yield from ()

        changed = [("the clocks", broken), *doctor.EXAMINATIONS]
        monkeypatch.setattr(doctor, "EXAMINATIONS", tuple(changed))

    def test_d002(self) -> None:
        run("drop table django_mq_failedattempt")
        assert [each.id for each in examine()] == ["D002"]

    def test_d004(self) -> None:
        role = make_role("mq_doctor_test", "grant select on django_migrations to {role}")
        with acting_as(role):
            ids = {each.id for each in examine()}
        assert "D004" in ids
        assert "D001" not in ids

    def test_d001_without_another_explanation(self) -> None:
        (finding,) = examine()
        assert finding.id == "D001"
        assert finding.text.startswith("Could not look at the clocks: ")


def test_settings_with_errors_are_errors(settings: Any) -> None:
    """The system checks run before the doctor, and their exit code is otherwise 1: warnings."""
    settings.DJANGO_MQ = {"LEASE": "long"}
    with pytest.raises(CommandError, match="E001") as raised:
        call_command("mq_doctor", skip_checks=False)
    assert raised.value.returncode == 2


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


class TestOldSnapshots:
    def test_d005_a_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with second_connection() as other:
            other.execute("begin isolation level repeatable read; select 1")
            pid = other.info.backend_pid
            assert not any(f"session {pid} " in text for text in found("D005"))
            monkeypatch.setattr(upkeep, "OLD_SNAPSHOT_SECONDS", 0.0)
            assert any(f"pg_terminate_backend({pid})" in text for text in found("D005"))
            (text,) = [text for text in found("D005") if f"session {pid} " in text]
            assert re.search(r"keeps vacuum from removing rows that died after \d{4}-", text)

    def test_d006_a_prepared_transaction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "OLD_SNAPSHOT_SECONDS", 0.0)
        with second_connection() as other:
            if other.execute("show max_prepared_transactions").fetchone() == ("0",):
                pytest.skip("the server prepares no transactions")
            other.execute("begin; select txid_current(); prepare transaction 'mq''doctor'")
            try:
                assert any("ROLLBACK PREPARED 'mq''doctor'" in text for text in found("D006"))
            finally:
                other.execute("rollback prepared 'mq''doctor'")

    def test_d006_quotes_the_name_of_the_transaction(self) -> None:
        """The client that prepares it chooses any text; operators copy the command."""
        since = datetime(2026, 1, 1, tzinfo=UTC)
        holder = HorizonHolder("prepared transaction", "it's {0}", "ada", "", "", since)
        assert upkeep.hint_for(holder).endswith("ROLLBACK PREPARED 'it''s {0}'.")

    def test_d007_a_slot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "RETAINED_WAL_BYTES", 0)
        name = f"mq_doctor_{connection.settings_dict['NAME'].removeprefix('test_')}"[:63]
        with second_connection() as other:
            other.execute("select pg_create_physical_replication_slot(%s, true)", [name])
            try:
                assert any(f"drop_replication_slot('{name}')" in text for text in found("D007"))
            finally:
                other.execute("select pg_drop_replication_slot(%s)", [name])
        assert found("D007") == []


class TestVacuum:
    def test_d008_autovacuum_is_off_for_a_table(self) -> None:
        assert found("D008") == []
        run("alter table django_mq_uniquekey set (autovacuum_enabled = off)")
        (text,) = found("D008")
        assert "off for django_mq_uniquekey" in text

    @pytest.mark.django_db(transaction=True)
    def test_d009_dead_rows_that_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "DEAD", 50)
        monkeypatch.setattr(upkeep, "UNVACUUMED", 0.0)
        run(
            "alter table django_mq_queuedmessage set (autovacuum_enabled = off)"
        )  # it may be quicker
        try:
            for _ in range(100):
                add()
            run("delete from django_mq_queuedmessage")
            run("select pg_stat_force_next_flush()")
            assert any("django_mq_queuedmessage has " in text for text in found("D009"))
        finally:
            run("alter table django_mq_queuedmessage reset (autovacuum_enabled)")
        run("vacuum django_mq_queuedmessage")
        run("select pg_stat_force_next_flush()")
        # Other tables have leftovers of earlier tests.
        assert not any("django_mq_queuedmessage has " in text for text in found("D009"))

    @pytest.mark.parametrize(
        ("dead", "live", "since", "is_found"),
        [
            (300_000, 250_000, 700.0, True),
            (300_000, 350_000, 700.0, False),
            (150_000, 100_000, 700.0, False),
            (300_000, 250_000, 500.0, False),
            (300_000, 250_000, None, True),
        ],
    )
    def test_d009_dead_rows_that_are_many_beside_the_live_ones_for_ten_minutes(
        self,
        dead: int,
        live: int,
        since: float | None,
        is_found: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        found_now = {"django_mq_queuedmessage": Versions(dead, live, since)}
        monkeypatch.setattr(upkeep, "versions", lambda cursor: found_now)
        assert bool(found("D009")) == is_found


class TestD010Listening:
    def test_it_arrives(self) -> None:
        assert found("D010") == []

    def test_another_database(
        self, alias: Alias, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(links, "RING_SECONDS", 0.1)
        settings.DJANGO_MQ = {"WAKEUP": alias("elsewhere", NAME="postgres")}
        (text,) = found("D010")
        assert "does not reach LISTEN on 'elsewhere'" in text

    def test_a_server_that_refuses(self, alias: Alias, settings: Any) -> None:
        settings.DJANGO_MQ = {"WAKEUP": alias("nowhere", NAME="no_such_database")}
        (text,) = found("D010")
        assert "no_such_database" in text

    def test_a_worker_that_cannot_listen(self) -> None:
        beat(wakeup="degraded", host="h", pid=9)
        beat("gone", wakeup="degraded", host="g", seen=-60)
        (text,) = found("D010")
        assert "poll: h:9." in text


def test_d011_a_pooler_without_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("D011") == []
    with Pooler(connection.get_connection_params()) as pooler:
        monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connection.settings_dict, "PORT", pooler.port)
        (text,) = found("D011")
        assert "'default' connects through a pooler" in text
        monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
        assert found("D011") == []


def test_d012_clocks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("D012") == []
    monkeypatch.setattr(session_facts, "time", lambda: 1_000_000_000.0)
    (text,) = found("D012")
    assert "ahead of this machine's" in text
    monkeypatch.setattr(session_facts, "time", lambda: 10_000_000_000.0)
    (text,) = found("D012")
    assert "s behind this machine's" in text


def test_d012_a_difference_that_the_way_to_the_server_may_explain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for ahead, is_found in ((1.4, False), (-1.4, False), (1.6, True), (-1.6, True)):
        monkeypatch.setattr(session_facts, "compare_clocks", lambda _, ahead=ahead: (ahead, 0.5))
        assert bool(found("D012")) == is_found


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
    monkeypatch.setattr(session_facts, "notify_arrives", lambda *_, **__: False)
    assert found("D010") == []  # a standby hears nothing, but D022 says it all


@pytest.mark.parametrize(("count", "told"), [(1, "1 session waits"), (2, "2 sessions wait")])
def test_d033_commits_that_wait_for_a_standby(
    monkeypatch: pytest.MonkeyPatch, count: int, told: str
) -> None:
    assert found("D033") == []
    monkeypatch.setattr(server_facts, "waiting_commits", lambda *_, **__: (count, timezone.now()))
    (text,) = found("D033")
    assert text.startswith(f"{told} in COMMIT for a synchronous standby, the first since 20")


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


class TestQueuesAndTypes:
    def test_d013_a_queue_without_a_worker(self) -> None:
        beat(queues=["shop.*"])
        add("shop.eu")
        add("mail")
        add("later", after=60)
        add("later", after=60)
        add("paused")
        decide("paused", paused=-1)
        levels = {each.text.partition(",")[0]: each.level for each in examine()}
        assert levels == {
            "1 message waits in the queue mail": "error",
            "2 messages wait in the queue later": "warning",
        }

    def test_d013_one_that_is_quiet_can_be_resumed_unless_it_drains(self) -> None:
        beat("other", queues=["other"])
        beat("leaving", queues=["mail"], quiet=True, draining=True)
        add("mail")
        (text,) = found("D013")
        assert "no live worker serves it. Start one" in text
        beat("resting", queues=["mail"], quiet=True)
        (text,) = found("D013")
        assert "no live worker serves it that is not quiet. Resume one" in text

    def test_d013_names_the_worker_that_is_gone(self) -> None:
        """It may be frozen, or its host is away: another one is not what is missing."""
        beat("other", queues=["other"])
        gone = beat("frozen", queues=["mail"], seen=-90, host="h", pid=9)
        add("mail")
        (text,) = found("D013")
        assert (
            "no live worker serves it. The last one was worker frozen (host h, process 9), whose"
            f" last heartbeat came at {local_text(gone.last_seen)}." in text
        )

    def test_d014_type_without_a_handler(self) -> None:
        beat()
        add(held=-9, type="shop.orders.lost")
        (finding,) = [each for each in examine() if each.id == "D014"]
        assert "1 message of type shop.orders.lost is held" in finding.text
        command = finding.hint.rpartition("manage.py ")[2].removesuffix(".")
        assert command == "mq_purge --type shop.orders.lost --waiting"
        call_command(*command.split(), "--yes", stdout=StringIO())
        assert found("D014") == []

    def test_d014_a_misspelt_type(self) -> None:
        handler("shop.orders.placed", name="h")(print)
        beat()
        add("default", held=-9, type="shop.order.placed")
        (text,) = found("D014")
        assert "Did you mean shop.orders.placed?" in text

    def test_d014_a_handler_that_may_not_take_from_the_queue(self) -> None:
        """The reason is not that nobody hears the type: the hint names a message that says it."""
        handler("shop.orders.placed", queue="mail", name="send")(print)
        beat()
        held = {"handler": "send", "held": -9, "type": "shop.orders.placed"}
        first = add("mail", **held).pk
        add("ledger", **held)
        (finding,) = [each for each in examine() if each.id == "D014"]
        assert "2 messages of type shop.orders.placed are held: no worker" in finding.text
        assert "by name, type, schema version and queue" in finding.text
        assert f"manage.py mq_why {first}" in finding.hint

    def test_d014_a_renamed_handler(self) -> None:
        """To drop the messages is not the first thing to do: they run under an alias."""
        handler("shop.orders.placed", queue="mail", name="send_mail")(print)
        beat()
        add("mail", handler="send", held=-9, type="shop.orders.placed")
        (text,) = found("D014")
        assert "is held: no worker has a handler that takes it, by name" in text
        assert "give a renamed one its former name in aliases=" in text

    def test_d014_a_renamed_task(self) -> None:
        """Tasks have no aliases: a task at the old path calls the new one."""
        beat()
        add(handler="shop.tasks.old", held=-9, type="tasks.shop.tasks.old")
        (text,) = found("D014")
        assert "if it was renamed, leave a task at its old path that calls the new one" in text
        assert "aliases" not in text
        assert "where" not in text

    def test_d014_counts_each_message_once_and_names_the_first(self) -> None:
        """Where few are due, the ones due for longest are also those due last."""
        beat()
        first = add(type="one.lost", held=-9, after=-60).pk
        add(type="one.lost", held=-9, after=-900)
        add(type="two.lost", held=-9, after=60)
        add()
        one, two = [each for each in examine() if each.id == "D014"]
        assert one.text.startswith("2 messages of type one.lost are held")
        assert f"mq_why {first} " in one.hint
        assert two.text.startswith("1 message of type two.lost is held")

    def test_d014_in_the_middle_of_a_backlog(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rows that are read are bounded, so the doctor says what it has not seen."""
        monkeypatch.setattr(import_module("django_mq.queues.topology"), "HELD_PER_LANE", 1)
        beat()
        for after in (-90, -10):
            add(after=after)
        add(type="shop.lost", held=-9, after=-60)
        (text,) = found("D014")
        assert text.startswith("1 message in the queue mail is held: no worker has a handler")
        add(type="shop.found", held=-9, after=-900)
        (text,) = found("D014")
        assert text.startswith("1+ messages of type shop.found are held: no worker has a handler")

    def test_d015_handlers_without_a_worker(self) -> None:
        handler("a.b", queue="reports", name="sums")(print)
        assert found("D015") == []  # no worker runs at all, so no handler is known to be missing
        beat("resting", queues=["mail"], quiet=True)
        assert found("D015") == []  # nor if all rest
        beat(queues=["mail", "default"])
        (text,) = found("D015")
        assert "reports has handlers (sums)" in text

    @pytest.mark.parametrize(
        ("queue", "given"), [("reports", {"queue": "reports"}), ("default", {})]
    )
    def test_d015_names_first_the_handlers_whose_queue_it_is(
        self, queue: str, given: dict[str, str]
    ) -> None:
        """Each task may run in each queue of TASKS, so others would come first."""
        handler("a.b", name="z", **given)(print)  # type: ignore[call-overload]
        for name in "abcd":
            handler("c.d", queue="mail", queues=(queue,), name=name)(print)
        beat(queues=["mail"])
        [text] = [each for each in found("D015") if f"queue {queue} " in each]
        assert f"{queue} has handlers (z, a, b)" in text

    def test_d024_messages_behind_a_dead_letter(self) -> None:
        beat()
        first = add(key="k", handler="h", dead=-5)
        add(key="other", handler="h", dead=-5)  # nothing waits behind it
        late = add(key="late", handler="h", after=60)
        add(key="late", handler="h", blocked_by=late.pk)
        add(key="k", handler="h", blocked_by=first.pk)
        (finding,) = [each for each in examine() if each.id == "D024"]
        assert finding.level == "warning"
        assert finding.text.startswith("1 message waits in the queue mail behind a dead letter of")
        assert f"mq_why {first.pk} explains" in finding.hint
        assert "--heads" not in finding.hint
        second = add(key="m", handler="h", dead=-5)
        add(key="m", handler="h", blocked_by=second.pk)
        (text,) = found("D024")
        assert "2 messages wait in the queue mail behind 2 dead letters of their key" in text
        (several,) = [each for each in examine() if each.id == "D024"]
        assert "manage.py mq_peek mail --heads lists them" in several.hint
        command = finding.hint.partition("manage.py ")[2].split("manage.py ")[1].split(" runs")[0]
        call_command(*command.split(), stdout=StringIO())
        (text,) = found("D024")
        assert text.startswith("1 message waits in the queue mail behind a dead letter of its key")

    def test_d024_marks_that_there_may_be_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(import_module("django_mq.queues.doctor.subscriptions"), "MAX_LINES", 2)
        beat()
        for key in "abc":
            first = add(key=key, handler="h", dead=-5)
            add(key=key, handler="h", blocked_by=first.pk)
        (text,) = found("D024")
        assert text.startswith("2+ messages wait in the queue mail behind 2+ dead letters of")

    def test_d024_not_where_the_queue_skips_dead_heads(self, settings: Any) -> None:
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
        beat()
        first = add(key="k", handler="h", dead=-5)
        add(key="k", handler="h", blocked_by=first.pk)
        assert found("D024") == []


class TestOutages:
    def test_d025_a_queue_that_backs_off(self) -> None:
        beat()
        state = decide(backoff=60, backoff_level=5)
        decide("empty", backoff=60, backoff_level=5)
        decide("paused", backoff=60, backoff_level=5, paused=-1)
        add("paused")
        add(dead=-5)
        assert found("D025") == []  # only an ack lowers the level, so that of an empty queue stays
        add()
        add(after=60)
        (finding,) = [each for each in examine() if each.id == "D025"]
        until = local_text(state.backoff_until)
        assert finding.level == "warning"
        assert finding.text == (
            f"The queue mail backs off until {until} (level 5), and 2 messages wait in it."
        )
        commands = re.findall(r"mq_errors \S+ \S+|mq_resume \S+ --backoff", finding.hint)
        assert [command.split()[0] for command in commands] == ["mq_errors", "mq_resume"]
        assert "mq_why ID" in finding.hint
        for command in commands:
            call_command(*command.split(), stdout=StringIO())
        assert found("D025") == []

    def test_d025_one_that_probes(self) -> None:
        beat()
        decide(backoff=-1, backoff_level=2)
        add()
        (text,) = found("D025")
        assert text.startswith(
            "The queue mail backs off and probes (level 2), and 1 message waits in it."
        )

    def test_d026_a_handler_that_acks_nothing(self) -> None:
        """The figures of snoozes are only the times that the handler ran."""
        figures_of("relay", ran={"40": 8})
        figures_of("relay", ago=5, worker="v", ran={"40": 1, "67": 2})
        figures_of("relay", ago=30, ran={"40": 900})
        assert found("D026") == []
        figures_of("relay", ago=2, failed=1, retried=1, ran={"40": 1})
        (finding,) = [each for each in examine() if each.id == "D026"]
        assert (finding.level, finding.text) == (
            "warning",
            "The handler relay in the queue mail acked nothing in the last 10 minutes: 12 attempts"
            " failed or were snoozed.",
        )
        command = re.findall(r"mq_errors \S+ \S+", finding.hint)[0]
        call_command(*command.split(), stdout=StringIO())
        figures_of("relay", ago=3, acked=1)
        assert found("D026") == []

    def test_d026_attempts_that_left_no_time(self) -> None:
        """A killed worker's attempts fail, and nobody knows how long they ran."""
        figures_of("h", failed=200, dead=200)
        figures_of("", failed=200, dead=200)  # without a handler known here: D014 reports it
        (text,) = found("D026")
        assert text.startswith("The handler h in the queue mail acked nothing")
        assert "200 attempts failed" in text

    def test_d027_a_forgotten_pause(self) -> None:
        beat()
        state = decide(paused=-4 * 3600)
        decide("empty", paused=-4 * 3600)
        decide("resumed", paused=-4 * 3600, until=-60)
        add("resumed", after=-3 * 3600)
        add("running", after=-3 * 3600)
        add(after=-3500)
        add(after=60)
        add(after=-3 * 3600, held=-60)
        add(after=-3 * 3600, leased=60)
        add(after=-3 * 3600, dead=-60)
        assert found("D027") == []
        add(after=-3 * 3600)
        (finding,) = [each for each in examine() if each.id == "D027"]
        assert (finding.level, finding.text) == (
            "warning",
            f"The queue mail has been paused since {local_text(state.paused_at)}, and its oldest"
            " message has been due for 3 h.",
        )
        (command,) = re.findall(r"mq_resume \w+", finding.hint)
        call_command(*command.split(), stdout=StringIO())
        assert found("D027") == []

    def test_d027_a_pause_with_an_end(self) -> None:
        state = decide(paused=-4 * 3600, until=86_400)
        add(after=-2 * 86_400)
        (text,) = found("D027")
        assert f", until {local_text(state.paused_until)}, and its oldest message" in text
        assert "has been due for 2 d." in text

    def test_d028_busy_workers(self) -> None:
        """More room would start the message: it waits for nothing else."""
        due = {"after": -3600}
        busy = {"threads": 4, "threads_used": 4.0, "slots": 10, "slots_used": 0.0}
        beat("a", queues=["mail", "short", "full", "off", "slow", "quick"], **busy)
        beat("b", queues=["quick"], **{**busy, "threads_used": 3.5})
        beat("quiet", queues=["mail"], quiet=True)
        beat("gone", queues=["mail"], seen=-60)
        add("short", after=-200)
        decide("off", paused=-5)
        decide("slow", backoff=60, backoff_level=5)
        decide("full", max_in_flight=1)
        add("full", leased=60)
        for queue in ("full", "off", "slow", "quick", "unserved"):
            add(queue, **due)
        assert found("D028") == []
        add("mail", **due)
        (finding,) = [each for each in examine() if each.id == "D028"]
        assert (finding.level, finding.text) == (
            "warning",
            "A message in the queue mail has been due for 1 h, and the worker that serves it is"
            " 100% busy.",
        )
        beat("c", queues=["mail"], **{**busy, "slots_used": 9.2, "threads_used": 0.0})
        (text,) = found("D028")
        assert "1 h, and all 2 workers that serve it are at least 92% busy." in text
        assert "or give each more threads: " in text
        call_command(*re.findall(r"mq_workers", text), stdout=StringIO())
        WorkerHeartbeat.objects.filter(pk="a").update(threads_used=1.0, slots_used=10.0)
        assert "or give each more slots (ASYNC_SLOTS): " in found("D028")[0]
        beat("unknown", queues=["mail"])
        assert found("D028") == []

    @pytest.mark.parametrize("running", [False, True])
    def test_d028_an_ordered_queue_is_not_faster_with_more_threads(
        self, settings: Any, running: bool
    ) -> None:
        settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
        beat(threads=1, threads_used=1.0)
        if running:
            add("line", ordered=True, leased=60)
        add("line", ordered=True, after=-3600)
        assert len(found("D028")) == (not running)

    def test_d032_a_worker_with_room_claims_nothing(self, settings: Any) -> None:
        """It lacks a right, or a session has locked the rows: its log says so, nothing else did."""
        settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}, "full": {"max_in_flight": 1}}}
        hour = timezone.now() - timedelta(hours=1)
        beat("young", threads=2, threads_used=0.0)
        beat("working", queues=["mail"], started_at=hour, threads=2, threads_used=1.0)
        beat("new", queues=["mail"], started_at=hour)
        # A suspect runs alone, or the last handler before max_messages: that takes one thread of 8.
        beat("alone", running=[1], started_at=hour, threads=8, threads_used=1.0)
        add("mail", after=-3600)
        assert found("D032") == []
        beat("idle", started_at=hour, host="h", pid=7, threads=2, threads_used=0.1)
        (finding,) = [each for each in examine() if each.id == "D032"]
        assert (finding.level, finding.text) == (
            "warning",
            "A message in the queue mail has been due for 1 h, and none of the queue is in flight,"
            " although worker idle (host h, process 7) serves it and is 5% busy.",
        )
        assert "manage.py mq_why ID" in finding.hint
        assert "loop_blocked" in finding.hint
        options = settings.DJANGO_MQ
        settings.DJANGO_MQ = {**options, "POLL_INTERVAL": 1900.0}
        assert found("D032") == []  # a worker may sleep for that long
        settings.DJANGO_MQ = options
        add("mail", leased=60)
        for queue in ("off", "slow", "full"):
            add(queue, after=-3600)
        decide("off", paused=-1)
        decide("slow", backoff=60, backoff_level=1)
        add("full", leased=60)
        add("line", ordered=True, after=-3600)  # behind a head that is retried
        add("recent", after=-60)
        assert found("D032") == []

    def test_d032_looks_again_before_it_reports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A message whose queue was resumed just now has been due for long, and is claimed next."""
        beat(started_at=timezone.now() - timedelta(hours=1), threads=2, threads_used=0.0)
        claimed, stays = add("resumed", after=-3600), add("mail", after=-3600)

        def claim(seconds: float) -> None:
            QueuedMessage.objects.filter(pk=claimed.pk).delete()

        monkeypatch.setattr(capacity, "sleep", claim)
        (text,) = found("D032")
        assert f"queue {stays.queue} has been due" in text


def figures_of(handler: str, ago: int = 0, worker: str = "w", **given: Any) -> None:
    """Store the figures of a minute, `ago` minutes before this one."""
    at = timezone.now().replace(second=0, microsecond=0) - timedelta(minutes=ago)
    MinuteFigures.objects.create(minute=at, worker=worker, queue="mail", handler=handler, **given)


class TestAnotherDatabase:
    """Ids and names of one database mean something else in another one."""

    @pytest.fixture(autouse=True)
    def _messages_are_elsewhere(self, settings: Any, alias: Alias) -> None:
        settings.DJANGO_MQ = {"DATABASE": alias("elsewhere")}

    def hints(self, id: str) -> list[str]:
        return [each.hint for each in examine(using="default") if each.id == id]

    def test_the_commands_name_it(self) -> None:
        add("mail", key="k", handler="h")
        assert "mq_worker --database default." in self.hints("D020")[0]
        beat(queues=["other"])
        assert "mq_worker --queue mail --database default." in self.hints("D013")[0]
        put("full", due=600, last_error="BroadcastBusy: no room")
        put("ended", due=None, last_error="InvalidOption: tz")
        decide("other", backoff=60, backoff_level=5)
        add("other")
        assert "mq_resume other --backoff --database default" in self.hints("D025")[0]
        decide("late", paused=-9000)
        add("late", after=-9000)
        assert "mq_resume late --database default" in self.hints("D027")[0]
        ended, full = self.hints("D019")
        assert "mq_schedule run full --database default broadcasts" in full
        assert "mq_schedule enable ended --database default." in ended

    @pytest.mark.slow
    def test_the_commands_that_are_copied_from_it_change_this_one(self) -> None:
        beat()
        add(held=-9, type="shop.lost")
        (hint,) = self.hints("D014")
        assert re.search(r"mq_why \d+ --database default gives", hint)
        command = hint.rpartition("manage.py ")[2].removesuffix(".")
        call_command(*command.split(), "--yes", stdout=StringIO())
        assert self.hints("D014") == []
        first = add(key="k", handler="h", dead=-5)
        add(key="k", handler="h", blocked_by=first.pk)
        (hint,) = self.hints("D024")
        (command,) = re.findall(r"mq_purge .*?(?= drops)", hint)
        assert f"mq_requeue --id {first.pk} --database default runs" in hint
        call_command(*command.split(), "--yes", stdout=StringIO())
        assert self.hints("D024") == []


class TestSchedules:
    #: A month, and a delay that reads the same for half an hour of testing.
    MONTH = timedelta(days=30)
    LATE = -timedelta(days=2, hours=3, minutes=30).total_seconds()

    def told(self) -> list[tuple[str, str, str]]:
        ids = ("D018", "D019", "D020")
        return [(each.id, each.level, each.text) for each in examine() if each.id in ids]

    def test_d018_one_that_is_overdue(self) -> None:
        beat()
        put(due=-30)  # a deployment may last as long
        put("off", enabled=False, due=None)
        put("over", due=None)
        assert self.told() == []
        put("report", every=self.MONTH, due=self.LATE)
        assert self.told() == [("D018", "warning", "The schedule report is 2 d 3 h overdue.")]
        (text,) = found("D018")
        assert "Workers are alive" in text
        assert run_doctor()[0] == 1

    @pytest.mark.parametrize("use_tz", [True, False])
    def test_d018_is_an_error_once_a_whole_period_has_passed(
        self, use_tz: bool, settings: Any
    ) -> None:
        settings.USE_TZ = use_tz
        beat()
        put("report", cron="* * * * *", due=self.LATE)
        assert self.told() == [("D018", "error", "The schedule report is 2 d 3 h overdue.")]

    def test_d018_names_those_that_are_latest(self) -> None:
        beat()
        put("odd", cron="61 * * * *", due=self.LATE)  # its period is unknown
        for number in range(1, 5):
            put(f"s{number}", every=self.MONTH, due=self.LATE + 86400 + number)
            if number == 2:
                text = "3 schedules are overdue, by up to 2 d 3 h: odd, s1, s2."
                assert self.told() == [("D018", "warning", text)]
        text = "5 schedules are overdue, by up to 2 d 3 h: odd, s1, s2 and 2 more."
        assert self.told() == [("D018", "warning", text)]
        put("s5", cron="* * * * *", due=self.LATE + 86400 + 5)
        assert [each[:2] for each in self.told()] == [("D018", "error")]

    def test_d019_one_whose_last_broadcast_failed(self) -> None:
        beat()
        put("report", due=600, last_error="RoutingError: it cannot go to queue slow")
        put("off", enabled=False, due=None, last_error="full")
        (finding,) = [each for each in examine() if each.id == "D019"]
        assert finding.level == "warning"
        assert "report failed: RoutingError: it cannot go to queue slow" in finding.text
        assert "mq_schedule run report" in finding.hint

    def test_d019_is_an_error_if_the_schedule_does_not_continue(self) -> None:
        beat()
        put("full", due=self.LATE, last_error="BroadcastBusy: no room")
        put("stopped", due=None, last_error="InvalidOption: tz names the unknown time zone")
        assert [each[:2] for each in self.told()] == [("D019", "error"), ("D019", "error")]
        full, stopped = found("D019")
        assert "it is 2 d 3 h overdue" in full
        assert "mq_schedule enable stopped" in stopped

    def test_d020_schedules_and_no_worker(self) -> None:
        assert self.told() == []
        beat(seen=-60)
        put("off", enabled=False, due=None)
        assert run_doctor()[0] == 0
        put("later", due=600)
        assert self.told() == [
            ("D020", "warning", "No worker is alive, and 1 schedule is enabled.")
        ]
        put("report", every=self.MONTH, due=self.LATE)
        assert self.told() == [
            ("D020", "error", "No worker is alive, and 2 schedules are enabled."),
            ("D018", "warning", "The schedule report is 2 d 3 h overdue."),
        ]
        (text,) = found("D018")
        assert "Start a worker" in text

    def test_d020_operations_and_no_worker(self) -> None:
        queues.operate("requeue", queue="mail")
        assert self.told() == [("D020", "error", "No worker is alive, and 1 operation waits.")]
        add("mail")
        put("later", due=600)
        text = "No worker is alive, 1 message waits, 1 operation waits, and 1 schedule is enabled."
        assert self.told() == [("D020", "error", text)]

    def test_d020_messages_and_no_worker(self) -> None:
        """One finding for the fleet, instead of one for each queue."""
        add("paused")
        decide("paused", paused=-1)
        assert self.told() == []
        add("later", after=60)
        assert self.told() == [("D020", "warning", "No worker is alive, and 1 message waits.")]
        add("mail")
        put("later", due=600)
        assert self.told() == [
            ("D020", "error", "No worker is alive, 2 messages wait, and 1 schedule is enabled.")
        ]
        assert found("D013") == []
        beat(quiet=True)
        assert self.told() == []
        assert len(found("D013")) == 2


class TestLimits:
    def test_d016_statements_shorter_than_handlers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handler("a.b", name="long", timeout=60)(print)
        assert found("D016") == []
        options = {**connection.settings_dict["OPTIONS"], "options": "-c statement_timeout=5000"}
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
        (text,) = found("D016")
        assert "is 5 s" in text
        assert "long" in text

    def test_d017_too_few_connections(self, settings: Any) -> None:
        assert found("D017") == []
        settings.DJANGO_MQ = {"PROCESSES": 1000}
        (text,) = found("D017")
        assert "6000 connections" in text

    def test_d017_not_if_they_are_just_enough(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings.DJANGO_MQ = {"PROCESSES": 2, "THREADS": 4}
        for connections_, is_found in ((18, False), (17, True)):
            limits = LoginLimits(statement=0, connections=connections_)
            monkeypatch.setattr(session_facts, "login_limits", lambda _, limits=limits: limits)
            assert bool(found("D017")) == is_found
