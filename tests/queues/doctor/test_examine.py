"""The doctor as a whole: its command, and checks that fail (D001)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection

from django_mq.queues import doctor
from django_mq.queues.doctor import Finding, examine, schedules, schema
from django_mq.queues.transactions import reading
from django_mq.store.limits import Limits
from tests.database import second_connection
from tests.outbox.schedules.conftest import put
from tests.queues.doctor.conftest import Alias
from tests.queues.doctor.examined import run, run_doctor
from tests.roles import acting_as, make_role, skip_unless_able
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


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
        with pytest.raises(CommandError, match="id D099, X: the ids are D001 to D035") as raised:
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


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ("disk_full", "Correct what the text names, and run mq_doctor again."),
        ("serialization_failure", "Run mq_doctor again. A standby cancels queries"),
    ],
)
def test_d001_a_server_that_refuses(
    monkeypatch: pytest.MonkeyPatch, refusal: str, hint: str
) -> None:
    """It was reached, so the finding does not blame the settings of the connection."""

    def broken(alias: str) -> Iterator[Finding]:
        run(f"do $$ begin raise {refusal}; end $$")
        yield from ()

    monkeypatch.setattr(doctor, "EXAMINATIONS", (("the clocks", broken),))
    (finding,) = examine()
    assert f"the clocks: {refusal}" in finding.text
    assert finding.hint.startswith(hint)


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
