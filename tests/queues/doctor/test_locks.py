"""Findings about waits of the whole fleet: D031 and D033."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_mq.queues.doctor import examine, findings, locks
from django_mq.store import server_facts
from tests.database import second_connection, until_blocked
from tests.queues.doctor.examined import found
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_handlers")]

LOCK = "lock table django_mq_queuedmessage in access exclusive mode"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCKED_SECONDS", 0.0)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check waits for the lock in turn: let it do so for a tenth of the usual second."""
    short = findings.DOCTOR_LIMITS._replace(lock=findings.DOCTOR_LIMITS.lock / 10)
    monkeypatch.setitem(findings.short_cursor.keywords, "limits", short)


@pytest.mark.usefixtures("at_once", "short_waits")
def test_the_session_is_named_and_nothing_that_follows_from_it() -> None:
    with second_connection(application_name="alter") as other, other.transaction():
        other.execute(LOCK)
        pid = other.info.backend_pid
        (finding,) = [each for each in examine() if each.id in ("D001", "D031")]
    assert (finding.id, finding.level) == ("D031", "error")
    assert finding.text.startswith(f"Session {pid} of the server (")
    assert "alter, idle in transaction) has locked the table django_mq_queuedmessage" in (
        finding.text
    )
    assert f"select pg_terminate_backend({pid})" in finding.hint


def test_a_young_lock_is_part_of_a_migration() -> None:
    with second_connection() as other, other.transaction():
        other.execute(LOCK)
        assert list(locks.locks("default")) == []
        assert "has locked" in locks.explained("default")


@pytest.mark.usefixtures("at_once")
def test_a_lock_that_is_waited_for_counts_too() -> None:
    """A long report, a migration behind it, and everything else behind the migration."""
    with second_connection() as report, second_connection() as migration:
        pid, first = migration.info.backend_pid, report.info.backend_pid
        with report.transaction():
            report.execute("select count(*) from django_mq_queuedmessage")

            def migrate() -> None:
                with migration.transaction():
                    migration.execute(LOCK)

            thread = threading.Thread(target=migrate)
            thread.start()
            pid = migration.info.backend_pid
            until_blocked(pid)
            (finding,) = locks.locks("default")
        thread.join()
    assert f"Session {pid} of the server" in finding.text
    assert "to lock the table django_mq_queuedmessage" in finding.text
    assert f"It waits for session {first}: end what it waits for" in finding.hint
    assert list(locks.locks("default")) == []


@pytest.mark.usefixtures("at_once")
def test_waiting_session_names_only_the_awaited_table() -> None:
    with second_connection() as report, second_connection() as migration:
        with report.transaction():
            report.execute("select count(*) from django_mq_queuedmessage")

            def migrate() -> None:
                with migration.transaction():
                    migration.execute("lock table django_mq_result in access exclusive mode")
                    migration.execute(LOCK)

            thread = threading.Thread(target=migrate)
            thread.start()
            until_blocked(migration.info.backend_pid)
            (finding,) = locks.locks("default")
        thread.join()
    assert "waits to lock the table django_mq_queuedmessage, in a transaction" in finding.text


@pytest.mark.usefixtures("at_once")
def test_a_table_of_the_same_name_in_another_schema_is_no_finding() -> None:
    with second_connection() as other:
        other.execute("create schema tenant")
        try:
            other.execute("create table tenant.django_mq_queuedmessage ()")
            with other.transaction():
                other.execute("lock table tenant.django_mq_queuedmessage")
                assert list(locks.locks("default")) == []
        finally:
            other.execute("drop schema tenant cascade")


@pytest.fixture
def stranger() -> Iterator[str]:
    """A role that does not see when the transactions of other logins began."""
    name = f"mq_stranger_{secrets.token_hex(4)}"
    with second_connection() as server:
        server.execute(f"create role {name}")
        yield name
        server.execute(f"drop role {name}")


def test_a_lock_of_hidden_age_counts_once_it_has_kept_a_session_waiting(
    stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCKED_SECONDS", 0.01)

    def found() -> list[str]:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"set local role {stranger}")
            return [each.text for each in locks.locks("default")]

    with second_connection() as migration, second_connection() as reader:
        with migration.transaction():
            migration.execute(LOCK)
            assert found() == []

            def read() -> None:
                reader.execute("select count(*) from django_mq_queuedmessage")

            thread = threading.Thread(target=read)
            thread.start()
            until(found, "the lock is found")
        thread.join()


def test_a_caller_keeps_its_settings() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '20s'")
        examine()
        cursor.execute("show lock_timeout")
        assert cursor.fetchone() == ("20s",)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("mode", ["access share", "row exclusive", "share update exclusive"])
def test_lock_that_does_not_block_claims_is_no_finding(mode: str) -> None:
    with second_connection() as other, other.transaction():
        other.execute(f"lock table django_mq_queuedmessage in {mode} mode")
        assert list(locks.locks("default")) == []


@pytest.mark.usefixtures("short_waits")
def test_no_check_waits_for_long() -> None:
    """Every table is locked: each check fails in turn, and none hangs."""
    tables = ", ".join(findings.own_tables())
    with second_connection() as other, other.transaction():
        other.execute(f"lock table {tables} in access exclusive mode")
        failed = [each for each in examine() if each.id == "D001"]
    assert failed
    assert all("lock timeout" in each.text for each in failed)
    assert connection.is_usable()


@pytest.mark.parametrize(("count", "told"), [(1, "1 session waits"), (2, "2 sessions wait")])
def test_d033_commits_that_wait_for_a_standby(
    monkeypatch: pytest.MonkeyPatch, count: int, told: str
) -> None:
    assert found("D033") == []
    monkeypatch.setattr(server_facts, "waiting_commits", lambda *_, **__: (count, timezone.now()))
    (text,) = found("D033")
    assert text.startswith(f"{told} in COMMIT for a synchronous standby, the first since 20")
