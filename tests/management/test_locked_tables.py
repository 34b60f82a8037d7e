"""Operator commands beside a session that has a table locked, such as a stuck migration."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from django_mq.management import databases
from django_mq.management.commands import mq_status
from django_mq.models import QueuedMessage
from tests.database import second_connection
from tests.rows import add

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pid(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Lock the table of the messages; yields the process id of the session."""
    monkeypatch.setattr(databases, "LOCK_SECONDS", 0.1)
    with second_connection(application_name="alter") as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage in access exclusive mode")
        yield other.info.backend_pid


@pytest.mark.parametrize(
    "command",
    [
        ["mq_status"],
        ["mq_status", "mail"],
        ["mq_why", "1"],
        ["mq_peek"],
        ["mq_routes"],
        ["mq_pause", "mail", "--yes"],
        ["mq_requeue", "--queue", "mail", "--yes"],
        ["mq_purge", "--all", "--yes"],
        ["mq_run_now", "--queue", "mail", "--yes"],
    ],
    ids=" ".join,
)
def test_a_command_names_the_session_instead_of_waiting(pid: int, command: list[str]) -> None:
    with pytest.raises(CommandError) as raised:
        call_command(*command)
    assert str(raised.value).startswith(
        f"the command has waited too long for a lock. Session {pid} of the server ("
    )
    assert f"select pg_terminate_backend({pid})" in str(raised.value)
    assert raised.value.returncode == 1


@pytest.mark.parametrize("command", ["mq_requeue", "mq_purge", "mq_run_now"])
def test_refused_change_names_the_session_that_holds_the_lock(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CREATE INDEX does: the messages are found, and cannot be changed."""
    monkeypatch.setattr(databases, "LOCK_SECONDS", 0.1)
    rows = [add(dead=-1), add(after=3600)]
    with second_connection() as other, other.transaction():
        other.execute("lock table django_mq_queuedmessage in share mode")
        with pytest.raises(CommandError) as raised:
            call_command(command, "--queue", "mail", "--yes")
        assert str(raised.value).startswith(
            "the command has waited too long for a lock."
            f" Session {other.info.backend_pid} of the server ("
        )
    assert list(QueuedMessage.objects.order_by("pk")) == rows


def test_watch_continues_after_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most migrations end, and the operator watches how the queues catch up."""
    monkeypatch.setattr(databases, "LOCK_SECONDS", 0.1)
    out = StringIO()
    with second_connection() as other:
        pid = other.info.backend_pid

        def pause(seconds: float) -> None:
            if "QUEUE" in out.getvalue():
                raise KeyboardInterrupt
            other.execute("rollback")

        monkeypatch.setattr(mq_status, "sleep", pause)
        other.execute("begin; lock table django_mq_queuedmessage in access exclusive mode")
        call_command("mq_status", "--watch", stdout=out)
    text = out.getvalue()
    assert 0 < text.find(f"Session {pid} of the server (") < text.find("QUEUE")


def test_a_session_that_has_ended_since_is_not_named(
    pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "explained", lambda alias: "")
    with pytest.raises(CommandError, match="Another session holds a lock: try again in a moment"):
        call_command("mq_peek")


def test_a_caller_keeps_its_own_limit() -> None:
    """A program may call a command within a transaction of its own."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("set local lock_timeout = '20s'")
        call_command("mq_peek")
        cursor.execute("show lock_timeout")
        assert cursor.fetchone() == ("20s",)


def test_no_limit_remains_in_the_session() -> None:
    """The session may be one that a pooler lends to others."""
    row = add(dead=-1)
    call_command("mq_requeue", "--id", str(row.pk))
    with connection.cursor() as cursor:
        cursor.execute("show lock_timeout")
        assert cursor.fetchone() == ("0",)
