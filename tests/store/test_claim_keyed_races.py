"""Concurrent claims of keyed messages, and lines that change during a claim."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from django_mq.messages import Fence
from django_mq.store import settle
from django_mq.store.claim_keyed import WINDOW
from django_mq.store.claim_lines import CLAIM_LINES
from django_mq.store.key_lines import LOCK_LINES
from tests.database import second_connection, until_any_blocked, until_blocked
from tests.rows import pks
from tests.store.keyed import (
    Cursor,
    blocked_by,
    claim_params,
    ids,
    keyed,
    line_params,
    take,
    take_open,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_claims_at_one_moment_never_share_a_line(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Guarantee 8: while one claim is not committed, another passes over its lines."""
    a = [keyed("a") for _ in range(4)]
    assert ids(take_open(other.cursor(), limit=2)) == pks(*a[:2])
    b = keyed("b")
    cursor.execute("set statement_timeout = '60s'")
    assert ids(take(cursor)) == [b.pk]
    other.commit()
    assert take(cursor).rows == []


def test_a_claim_that_came_to_nothing_leaves_its_lines_free(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    messages = [keyed(), keyed()]
    assert ids(take_open(other.cursor())) == pks(*messages)
    assert take(cursor).rows == []
    other.rollback()
    assert ids(take(cursor)) == pks(*messages)


def test_a_line_that_is_locked_is_seen_as_it_is_then(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """The snapshot follows the lock: a line claimed and committed in between counts as claimed."""
    keyed()
    theirs = other.cursor()
    theirs.execute("set transaction isolation level read committed")
    given = claim_params()
    cursor.execute("begin")
    cursor.execute(LOCK_LINES, given)
    assert len(cursor.fetchall()) == 1
    theirs.execute(LOCK_LINES, given)
    assert theirs.fetchall() == []  # the lock is held
    cursor.execute("rollback")
    theirs.execute(LOCK_LINES, given)
    [line] = theirs.fetchall()  # seen as free, then taken by a claim without locks
    cursor.execute(
        "update django_mq_queuedmessage"
        " set leased_until = now() + interval '30 s', claimed_by = 'x:1'"
    )
    theirs.execute(CLAIM_LINES, line_params(line))
    assert [row[0] for row in theirs.fetchall()] == [None]


def claimed_by(statement: str) -> list[int]:
    """Claim the line (mail, h, k) by `statement`, on a separate connection; return the ids."""
    with second_connection() as third, third.cursor() as mine, third.transaction():
        mine.execute(statement, line_params(("mail", "h", "k", 1)))
        return sorted(row[0] for row in mine.fetchall() if row[0] is not None)


def claimed_while(
    cursor: Cursor, other: psycopg.Connection[Any], change: str, values: Sequence[object]
) -> list[int]:
    """Claim the line (mail, h, k); `change` commits between the claim's snapshot and its locks.

    An advisory lock stops the statement there. Returns the ids.
    """
    slow = CLAIM_LINES.replace(
        "), locked as materialized (",
        "), stop as materialized (select pg_advisory_xact_lock(4711)), locked as materialized (",
    ).replace(
        "      from (select * from chosen order by line_n, seen_n) chosen\n",
        "      from stop cross join (select * from chosen order by line_n, seen_n) chosen\n",
    )
    assert "from stop cross join (select" in slow
    other.execute("select pg_advisory_xact_lock(4711)")
    took: list[int] = []

    thread = threading.Thread(target=lambda: took.extend(claimed_by(slow)))
    thread.start()
    until_any_blocked(event="advisory")
    cursor.execute(change, values)
    other.rollback()
    thread.join(30)
    return took


def test_claim_and_ack_lock_heads_in_the_same_order(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """A claim that parks behind a head renewed since its snapshot waits for the head's ack."""
    heads = [keyed("z", leased=30), keyed("a", leased=30)]  # lines are found by their keys
    followers = [keyed("az"[n % 2], after=-60) for n in range(WINDOW)]
    slow = CLAIM_LINES.replace(
        "     where not behind.ours\n",
        "     where not behind.ours and case when waiting.id is not null"
        " then pg_advisory_xact_lock(4711) is not null end\n",
    )
    assert "pg_advisory" in slow
    other.execute("select pg_advisory_xact_lock(4711)")
    with second_connection() as third, second_connection() as fourth, ThreadPoolExecutor(2) as pool:
        claim = pool.submit(third.execute, slow, line_params(window=WINDOW))
        until_blocked(third.info.backend_pid)  # it has locked the first of the heads
        cursor.execute("update django_mq_queuedmessage set leased_until = now() + interval '1 h'"
                       " where leased_until is not null")  # fmt: skip
        fences = [Fence(head.pk, head.attempts, head.claimed_by or "") for head in heads]
        acked = pool.submit(settle.ack, fourth.cursor(), fences)
        until_blocked(fourth.info.backend_pid)
        other.rollback()
        assert acked.result(30) == set(pks(*heads))
        claim.result(30)
    assert blocked_by(*followers) == [heads[1].pk, heads[0].pk] * (WINDOW // 2)


def test_a_head_that_changes_between_snapshot_and_lock_is_taken_all_the_same(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Trap 1: joined by ctid, the claim took the followers of a head updated in between."""
    messages = [keyed(), keyed(), keyed()]
    touch = "update django_mq_queuedmessage set last_error = 'touched' where id = %s"
    assert claimed_while(cursor, other, touch, [messages[0].pk]) == pks(*messages)


@pytest.mark.parametrize("key", ["k", None])
def test_a_message_that_joins_another_line_before_it_is_locked_is_not_taken(
    cursor: Cursor, other: psycopg.Connection[Any], key: str | None
) -> None:
    """Guarantee 8: a message of its new line may be running. `on_duplicate` can change the key."""
    moved, follower = keyed(key), keyed(key)
    move = "update django_mq_queuedmessage set key = 'another' where id = %s"
    took = claimed_while(cursor, other, move, [moved.pk])
    assert took == ([] if key else [follower.pk])
    assert ids(take(cursor)) == ([moved.pk, follower.pk] if key else [moved.pk])
