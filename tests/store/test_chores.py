"""Chores: small, guarded, and never on rows in use."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq.conf import get_settings
from django_mq.models import (
    FailedAttempt,
    Operation,
    QueuedMessage,
    QueueState,
    Result,
    WorkerHeartbeat,
)
from django_mq.store import chores, expiry, operations, pruning
from django_mq.worker import retention
from tests.rows import add, beat, columns, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def test_turns_are_taken_once_in_a_while(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """There is no leader: the first to ask after `every` seconds has the turn."""
    assert chores.take_turn(cursor, every=60.0) == {}
    assert chores.take_turn(cursor, every=60.0) is None
    assert chores.take_turn(other.cursor(), every=60.0) is None
    other.rollback()
    chores.resume_at(cursor, {"stranded": 7, "aside": ["mail", "h", "t", "a"]})
    for at in (-61, 61):  # a time far ahead is not from this clock, and stops nothing
        QueueState.objects.update(chores_ran_at=columns({"created": at})["created_at"])
        resume = chores.take_turn(other.cursor(), every=60.0)
        assert resume == {"stranded": 7, "aside": ["mail", "h", "t", "a"]}
        other.commit()
        assert chores.take_turn(cursor, every=60.0) is None


@pytest.mark.parametrize(
    "positions",
    ["[1]", '{"stranded": %s}' % ("1" * 5000), "[" * 5000 + "]" * 5000],
    ids=["a list", "5,000 digits", "5,000 deep"],
)
def test_malformed_positions_are_ignored(cursor: Cursor, positions: str) -> None:
    """Guarantee 24: the walks start from the beginning, whatever Python cannot decode."""
    cursor.execute(
        "insert into django_mq_queuestate (queue, chores_resume) values (':', %s)", [positions]
    )
    assert chores.take_turn(cursor, every=60.0) == {}


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
    cursor.execute("set statement_timeout = '60s'")
    assert [len(expiry.expire(cursor, limit=2)) for _ in range(3)] == [2, 1, 0]
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
    pruning.prune(cursor, "attempts", older_than=40.0, limit=1)
    assert FailedAttempt.objects.count() == 2
    pruning.prune(cursor, "attempts", older_than=40.0, limit=10)
    assert FailedAttempt.objects.count() == 1
    pruning.prune(cursor, "results", older_than=40.0, limit=1)
    assert set(Result.objects.values_list("message_id", flat=True)) == {50, 1}
    chores.prune_workers(cursor, older_than=40.0)
    assert list(WorkerHeartbeat.objects.values_list("id", flat=True)) == ["w1"]


@pytest.mark.parametrize("kept", [None, True])
def test_old_rows_are_looked_for_behind_those_removed_before(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    """While a session holds a snapshot, the index keeps entries of all rows removed since then.

    `kept`: the position that another version of the code has stored.
    """

    def fail(ended: float) -> int:
        at = columns({"created": ended})["created_at"]
        row = FailedAttempt.objects.create(
            message_id=1, queue="q", type="t", attempt=1, ended_at=at
        )
        return int(row.pk)

    monkeypatch.setattr(retention, "PIECE_ROWS", 1)
    piece = retention.pruner("attempts", lambda settings: 40.0)
    left = [fail(ended) for ended in (-100, -90, -80)]
    at = piece(cursor, get_settings(), kept)
    left = [fail(-200), *left[2:]]
    at = piece(cursor, get_settings(), at)
    assert sorted(FailedAttempt.objects.values_list("pk", flat=True)) == sorted(left)
    at = piece(cursor, get_settings(), at)
    assert piece(cursor, get_settings(), at) is None  # the next walk begins with the oldest
    piece(cursor, get_settings(), None)
    assert not FailedAttempt.objects.exists()


def test_operations_that_ended_long_ago_are_forgotten(cursor: Cursor) -> None:
    def operation(state: str, ended: float | None) -> int:
        at = None if ended is None else columns({"created": ended})["created_at"]
        row = Operation.objects.create(
            action="requeue", filter={}, last_id=1, state=state, ended_at=at
        )
        return int(row.pk)

    old = [operation("done", -100 - n) for n in range(3)]
    kept = [operation("done", -10), operation("waiting", None), operation("running", None)]
    after = operations.prune(cursor, older_than=40.0, limit=2)
    assert after == old[1]
    assert set(Operation.objects.values_list("pk", flat=True)) == {old[2], *kept}
    assert operations.prune(cursor, older_than=40.0, after=after, limit=2) == kept[0]
    assert operations.prune(cursor, older_than=40.0, after=kept[0], limit=9) is None
    assert set(Operation.objects.values_list("pk", flat=True)) == set(kept)


def test_dead_letters_are_forgotten_queue_by_queue(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Guarantee 14: only dead letters, and only when a retention says so."""
    old = [add("mail", dead=-100 - n) for n in range(3)]
    spared = [add("mail", dead=-5), add("post", dead=-500), add("mail"), add("mail", leased=-500)]
    assert chores.dead_queues(cursor, after="", limit=100) == ["mail", "post"]
    lock(other, old[0].pk)
    cursor.execute("set statement_timeout = '60s'")
    assert len(pruning.prune_dead(cursor, queue="mail", older_than=50.0, limit=1).messages) == 1
    assert not QueuedMessage.objects.filter(pk=old[2].pk).exists()
    assert len(pruning.prune_dead(cursor, queue="mail", older_than=50.0, limit=9).messages) == 1
    assert set(QueuedMessage.objects.values_list("pk", flat=True)) == {
        old[0].pk, *(m.pk for m in spared)
    }  # fmt: skip


def test_no_queue_has_dead_letters(cursor: Cursor) -> None:
    add()
    assert chores.dead_queues(cursor, after="", limit=100) == []


# ---- a queue that grows too deep


def test_waiting_messages_are_counted_up_to_a_limit(cursor: Cursor) -> None:
    """CAR-38: unclaimed and not dead, over all priorities."""
    add(priority=-5)
    add(after=60)
    add(held=-1)
    add(key="k", dead=-1)
    add(key="k", blocked_by=1)
    add(leased=60, attempts=1)
    add(dead=-1)
    add("post")
    with cursor.connection.transaction():
        assert chores.count_with_blocked(cursor, {"mail": 100, "post": 1, "none": 5}) == {
            "mail": 4,
            "post": 1,
            "none": 0,
        }
        assert chores.count_with_blocked(cursor, {"mail": 1}) == {"mail": 1}


def test_counting_walks_its_indexes_and_stops(cursor: Cursor) -> None:
    """CAR-38: it runs every 10 s, with millions of rows."""
    cursor.execute(
        "insert into django_mq_queuedmessage (queue, type, payload)"
        " select 'mail', 't', '{}' from generate_series(1, 3000)"
    )
    cursor.execute("analyze django_mq_queuedmessage")
    cursor.execute(
        "explain (analyze, buffers off, timing off, costs off, summary off) " + chores.WAITING,
        {"queues": ["mail"], "limits": [1001]},
    )
    plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "using mq_claim" in plan
    assert "Seq Scan" not in plan
    assert "rows=3000" not in plan


def test_one_of_the_fleet_warns_once_in_a_while(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """CAR-38."""
    assert chores.take_warning(cursor, queue="mail", every=60.0) is True
    assert chores.take_warning(other.cursor(), queue="mail", every=60.0) is False
    assert chores.take_warning(other.cursor(), queue="post", every=60.0) is True
    other.rollback()
    for at in (-61, 61):
        QueueState.objects.update(warned_at=columns({"created": at})["created_at"])
        assert chores.take_warning(cursor, queue="mail", every=60.0) is True
        assert chores.take_warning(cursor, queue="mail", every=60.0) is False
