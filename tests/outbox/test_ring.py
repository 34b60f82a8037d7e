"""The ring after the commit: sent once, coalesced, and harmless when it fails."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import Message, broadcast, broadcast_many
from django_mq.models import QueuedMessage
from django_mq.outbox import notify as bell
from django_mq.store import notify as doorbell
from django_mq.store.insert import MAX_INSERT_ROWS
from tests.database import listening


@pytest.mark.django_db(transaction=True)
def test_it_rings_once_after_the_commit_with_nothing_to_read() -> None:
    """PMQ-3, S06."""
    with listening() as listener:
        with transaction.atomic():
            for _ in range(3):
                broadcast("a")
            broadcast_many([Message("a")] * (MAX_INSERT_ROWS + 1))
            assert len(connection.run_on_commit) == 1
            assert listener.heard() == []
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_a_rollback_rings_nothing() -> None:
    with listening() as listener:
        with transaction.atomic():
            broadcast("a")
            transaction.set_rollback(True)
        assert listener.heard() == []


@pytest.mark.django_db(transaction=True)
def test_a_savepoint_that_is_rolled_back_does_not_take_the_ring_of_others() -> None:
    with listening() as listener:
        with transaction.atomic():
            with transaction.atomic():
                broadcast("undone")
                transaction.set_rollback(True)
            assert connection.run_on_commit == []
            broadcast("kept")
        assert listener.heard() == [""]
        bell._last.clear()
        with transaction.atomic():
            with transaction.atomic():
                broadcast("inner")
            broadcast("outer")
            assert len(connection.run_on_commit) == 1
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_it_does_not_ring_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(bell, "monotonic", lambda: clock[0])
    heard = []
    with listening() as listener:
        for step in (0, 0.5, 0.4, 0.2):
            clock[0] += step * bell.RING_INTERVAL
            with transaction.atomic():
                broadcast("a")
            heard.append(len(listener.heard()))
    assert heard == [1, 0, 0, 1]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("changed", "options", "rings"),
    [
        pytest.param({}, {"after": 0.5}, 1, id="soon"),
        pytest.param({}, {"after": 1.5}, 0, id="a-poll-comes-first"),
        pytest.param({"POLL_INTERVAL": 2}, {"after": 1.5}, 1, id="a-poll-comes-later"),
        pytest.param({}, {"after": datetime.now(UTC) + timedelta(days=1)}, 1, id="moment"),
        pytest.param({"WAKEUP": "poll"}, {}, 0, id="poll"),
        pytest.param({"REQUIRE_ATOMIC": False}, {}, 1, id="no-block"),
    ],
)
def test_broadcast_rings_if_a_poll_would_be_late(
    settings: Any, changed: dict[str, Any], options: dict[str, Any], rings: int
) -> None:
    settings.DJANGO_MQ = changed
    block: Any = transaction.atomic() if changed != {"REQUIRE_ATOMIC": False} else nullcontext()
    with listening() as listener:
        with block:
            broadcast("a", **options)
        assert len(listener.heard()) == rings


@pytest.mark.django_db(transaction=True)
def test_failed_ring_is_harmless_and_the_next_one_rings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 7; PMQ-40."""
    after = []
    with listening() as listener:
        with monkeypatch.context() as patch, caplog.at_level("DEBUG", "django_mq"):
            patch.setattr(doorbell, "RING", "select no_such_function()")
            with transaction.atomic():
                broadcast("a")
                transaction.on_commit(lambda: after.append(QueuedMessage.objects.count()))
        assert after == [1]
        assert [record.levelname for record in caplog.records if record.name == "django_mq"] == [
            "DEBUG"
        ]
        with transaction.atomic():
            broadcast("a")
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_a_ring_does_not_change_how_the_session_commits() -> None:
    with connection.cursor() as cursor:
        cursor.execute("set synchronous_commit = on")
        with transaction.atomic():
            broadcast("a")
        cursor.execute("show synchronous_commit")
        assert cursor.fetchone() == ("on",)
