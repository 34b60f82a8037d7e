"""Chores: small, guarded, and never at what somebody works with."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq.models import (
    FailedAttempt,
    QueuedMessage,
    QueueState,
    Result,
    WorkerHeartbeat,
)
from django_mq.store import chores
from tests.committing import quick_flush  # noqa: F401  (a fixture)
from tests.rows import add, beat, columns, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def test_turns_are_taken_once_in_a_while(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """No leader: whoever asks first after `every` seconds."""
    assert chores.take_turn(cursor, every=60.0) is True
    assert chores.take_turn(cursor, every=60.0) is False
    assert chores.take_turn(other.cursor(), every=60.0) is False
    other.rollback()
    QueueState.objects.update(chores_ran_at=columns({"created": -61})["created_at"])
    assert chores.take_turn(cursor, every=60.0) is True
    assert chores.take_turn(cursor, every=60.0) is False


def test_expired_messages_die_where_they_wait(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    waiting = add(expires=-2)
    blocked = add(expires=-1, blocked_by=waiting.pk)
    delayed = add(expires=-1, after=60)
    spared = [
        add(expires=60),
        add(),
        add(expires=-1, leased=30, attempts=1),
        add(expires=-1, leased=-30, attempts=1),
        add(expires=-1, dead=-5, dead_reason="exhausted"),
    ]
    locked = add(expires=-3)
    lock(other, locked.pk)
    cursor.execute("set statement_timeout = '5s'")
    assert [len(chores.expire(cursor, limit=2)) for _ in range(3)] == [2, 1, 0]
    for message in (waiting, blocked, delayed):
        stored(message)
        assert (message.dead_reason, message.attempts, message.blocked_by) == ("expired", 0, None)
    assert {stored(m).dead_reason for m in spared} == {"", "exhausted"}
    assert stored(locked).dead_at is None


def test_old_attempts_results_and_workers_are_forgotten(cursor: Cursor) -> None:
    for ended in (-100, -50, -1):
        FailedAttempt.objects.create(
            message_id=1, queue="q", type="t", attempt=1,
            ended_at=columns({"created": ended})["created_at"],
        )  # fmt: skip
        Result.objects.create(message_id=-ended, value=1, **columns({"created": ended}))
        beat(f"w{-ended}", seen=ended)
    chores.forget_attempts(cursor, older_than=40.0, limit=1)
    assert FailedAttempt.objects.count() == 2
    chores.forget_attempts(cursor, older_than=40.0, limit=10)
    assert FailedAttempt.objects.count() == 1
    chores.forget_results(cursor, older_than=40.0, limit=1)
    assert set(Result.objects.values_list("message_id", flat=True)) == {50, 1}
    chores.forget_workers(cursor, older_than=40.0)
    assert list(WorkerHeartbeat.objects.values_list("id", flat=True)) == ["w1"]


def test_dead_letters_are_forgotten_queue_by_queue(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Guarantee 14: only what is dead, and only when a retention says so."""
    old = [add("mail", dead=-100 - n) for n in range(3)]
    spared = [add("mail", dead=-5), add("post", dead=-500), add("mail"), add("mail", leased=-500)]
    assert chores.dead_queues(cursor) == ["mail", "post"]
    lock(other, old[0].pk)
    cursor.execute("set statement_timeout = '5s'")
    assert chores.forget_dead(cursor, queue="mail", older_than=50.0, limit=1) == 1
    assert not QueuedMessage.objects.filter(pk=old[2].pk).exists()
    assert chores.forget_dead(cursor, queue="mail", older_than=50.0, limit=9) == 1
    assert set(QueuedMessage.objects.values_list("pk", flat=True)) == {
        old[0].pk, *(m.pk for m in spared)
    }  # fmt: skip


def test_no_queue_has_dead_letters(cursor: Cursor) -> None:
    add()
    assert chores.dead_queues(cursor) == []
