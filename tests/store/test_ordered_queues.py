"""Ordered queues: a claim takes the line from its head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.utils import timezone

from django_mq.executor.statements import ONE_PLAN
from django_mq.messages import Fence
from django_mq.models import QueuedMessage, QueueState
from django_mq.queues import actions as acting
from django_mq.store import ordered_queues, settle
from django_mq.store.ordered_queues import CLAIM_LINE, OwnedQueue
from tests.database import second_connection
from tests.pages_read import explained
from tests.rows import add, decide, pks, stored
from tests.store.conftest import lock
from tests.store.ordered import Cursor, own, row, take
from tests.store.plans import generic_plan

pytestmark = pytest.mark.django_db(transaction=True)

#: The parameters of the statement.
CLAIM: dict[str, Any] = {
    "queue": "line",
    "claimers": ["me:1"],
    "per_claimer": 100,
    "lease": 6.0,
    "limit": 100,
    "bytes": 1 << 20,
    "skip_dead": False,
    "admitted": False,
    "nonatomic": "{}",
    "first": 1,
    "lease_mark": 0.0,
}


@pytest.fixture
def owner(cursor: Cursor) -> Cursor:
    """A cursor of the worker `me`, which owns the queue."""
    assert own(cursor) == OwnedQueue(None)
    return cursor


# ---- the claim


def test_the_line_is_taken_in_order_of_ids(owner: Cursor) -> None:
    """PMQ-41: regardless of due time, priority, key and handler."""
    messages = [
        row(after=-1, handler="a"),
        row(after=-9, priority=50, handler="b"),
        row(after=-5, key="k", handler="a"),
        row(after=-7, handler=""),
    ]
    assert take(owner) == pks(*messages)
    assert [stored(message).attempts for message in messages] == [1] * 4


def test_only_the_owner_claims(cursor: Cursor) -> None:
    row()
    assert take(cursor) == []
    own(cursor, "other")
    assert take(cursor) == []
    ordered_queues.disown(cursor, worker="other")
    own(cursor, lease=-1.0)
    assert take(cursor) == []  # its lease lapsed, whether or not a worker came
    own(cursor)
    assert len(take(cursor)) == 1


def test_nothing_is_taken_while_something_is_in_flight(owner: Cursor) -> None:
    """Lapsed or not, in line or not: rows that the queue held before it was ordered count."""
    waiting = row()
    flying = add("line", leased=30)
    assert take(owner) == []
    QueuedMessage.objects.filter(pk=flying.pk).update(leased_until="2000-01-01 00:00Z")
    assert take(owner) == []
    flying.delete()
    assert take(owner) == [waiting.pk]


BLOCKING: dict[str, dict[str, Any]] = {
    "delayed": {"after": 60},
    "retrying": {"after": 60, "attempts": 3},
    "held": {"after": 60, "held": -3},
    "dead": {"dead": -1},
}


@pytest.mark.parametrize("state", BLOCKING)
def test_a_head_that_waits_blocks_the_line(owner: Cursor, state: str) -> None:
    """PMQ-44: nothing overtakes it, and the rows behind it are not written."""
    head = row(**BLOCKING[state])
    behind = row()
    assert take(owner) == []
    assert stored(behind).blocked_by is None
    if state != "dead":
        QueuedMessage.objects.filter(pk=head.pk).update(processable_after=behind.created_at)
        assert take(owner) == pks(head, behind)


@pytest.mark.parametrize("state", BLOCKING)
def test_one_that_waits_ends_the_run(owner: Cursor, state: str) -> None:
    first = row()
    row(**BLOCKING[state])
    row()
    assert take(owner) == [first.pk]


def test_dead_letter_is_passed_with_skip_dead(owner: Cursor) -> None:
    dead = row(dead=-1)
    messages = [row(), row()]
    row(dead=-1)
    assert take(owner) == []
    assert take(owner, skip_dead=True) == pks(*messages)
    assert stored(dead).attempts == 0


def test_a_dead_head_that_is_requeued_goes_first(owner: Cursor) -> None:
    dead = row(dead=-1, attempts=20)
    behind = row()
    assert take(owner) == []
    assert acting.requeue(dead.pk)
    assert take(owner, skip_dead=True) == pks(dead, behind)


@pytest.mark.parametrize("remove", [acting.discard, acting.purge])
def test_a_dead_head_that_is_removed_blocks_no_more(owner: Cursor, remove: Any) -> None:
    dead, behind = row(dead=-1), row()
    assert remove("line" if remove is acting.purge else dead.pk)
    assert take(owner) == [behind.pk]


@pytest.mark.parametrize(("limit", "maximum", "expected"), [(2, 1000, 2), (4, 25, 2), (4, 5, 1)])
def test_limits_cut_from_the_end(owner: Cursor, limit: int, maximum: int, expected: int) -> None:
    """PMQ-37, PMQ-57, guarantee 15: rows over the limit stay unlocked and unclaimed."""
    messages = [row(payload="x" * 10) for _ in range(4)]
    assert take(owner, limit=limit, max_bytes=maximum) == pks(*messages[:expected])
    left = QueuedMessage.objects.filter(leased_until__isnull=True, attempts=0)
    assert list(left.order_by("pk").values_list("pk", flat=True)) == pks(*messages[expected:])


def test_several_claims_in_one_statement_share_the_rows(owner: Cursor) -> None:
    """Guarantee 15: none gets more than its share of the limit."""
    messages = [row() for _ in range(6)]
    assert take(owner, limit=5, more_claimers=["me:8"]) == pks(*messages[:5])
    claimers = [stored(message).claimed_by for message in messages]
    assert claimers == ["me:7"] * 3 + ["me:8"] * 2 + [None]
    assert take(owner, more_claimers=["me:8"]) == []


def test_a_locked_row_ends_the_run(owner: Cursor, other: psycopg.Connection[Any]) -> None:
    messages = [row(), row(), row()]
    lock(other, messages[1].pk)
    owner.execute("set statement_timeout = '60s'")
    assert take(owner) == [messages[0].pk]


def test_a_locked_head_stops_the_line(owner: Cursor, other: psycopg.Connection[Any]) -> None:
    messages = [row(), row()]
    lock(other, messages[0].pk)
    owner.execute("set statement_timeout = '60s'")
    assert take(owner) == []
    other.rollback()
    assert take(owner) == pks(*messages)


PAUSES = {
    "paused": ({"paused": -1}, False, False),
    "paused, until later": ({"paused": -1, "until": 60}, False, False),
    "paused, until before": ({"paused": -9, "until": -1}, True, True),
    "backs off": ({"backoff_level": 2}, False, True),
    "limited": ({"max_in_flight": 1}, False, True),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_pause_or_limit_of_a_queue_stops_its_line(cursor: Cursor, pause: str) -> None:
    """A message admitted through the gate of a queue that backs off may run."""
    given, plainly, admitted = PAUSES[pause]
    decide("line", **given)
    own(cursor)
    message = row()
    assert take(cursor) == ([message.pk] if plainly else [])
    settle.release(cursor, [])
    QueuedMessage.objects.update(leased_until=None, claimed_by=None)
    assert take(cursor, admitted=True) == ([message.pk] if admitted else [])


def test_other_queues_do_not_matter(owner: Cursor) -> None:
    add("mail", ordered=True, leased=30)
    add("mail", ordered=True, after=60)
    message = row()
    assert take(owner) == [message.pk]


@contextmanager
def uncommitted_claim(cursor: Cursor) -> Iterator[None]:
    """A claim by `a`, whose ownership lapses soon, but on a busy machine not before the claim."""
    for lease in (0.3, 1.0, 5.0, 60.0):
        own(cursor, "a", lease=lease)
        with cursor.connection.transaction():
            if ordered_queues.claim(
                cursor, queue="line", worker="a", claimer="a:1", lease=6.0, limit=10,
                max_bytes=1000, skip_dead=False,
            ).rows:  # fmt: skip
                yield
                return
    pytest.fail("no claim")


def test_a_claim_keeps_the_queue_from_moving_until_it_is_committed(cursor: Cursor) -> None:
    """The second owner comes when it can see the first one's claim; nobody waits."""
    message = row()
    with second_connection() as other, other.cursor() as theirs:
        theirs.execute("set statement_timeout = '60s'")
        with uncommitted_claim(cursor):
            while QueueState.objects.get().owned_until > timezone.now():
                theirs.execute("select pg_sleep(0.01)")
            theirs.execute("select pg_sleep(0.01)")
            assert own(theirs, "b") is None
            ordered_queues.disown(theirs, worker="a")
        assert own(theirs, "b") == OwnedQueue("a")
        assert take(theirs, worker="b") == []
        settle.release(cursor, [Fence(message.pk, 1, "a:1")])
        assert take(theirs, worker="b") == [message.pk]


def test_the_plan_of_a_claim_names_its_index(owner: Cursor) -> None:
    owner.execute(
        """
        insert into django_mq_queuedmessage
               (queue, type, payload, ordered, processable_after, dead_at)
        select case when n % 2 = 0 then 'line' else 'mail' end, 'a', '{}', true,
               now() - interval '1 h', case when n % 7 = 0 then now() end
          from generate_series(1, 20000) n
        """
    )
    owner.execute("analyze django_mq_queuedmessage")
    owner.execute(ONE_PLAN)
    text = generic_plan(
        owner,
        CLAIM_LINE,
        **CLAIM,
    )
    assert "using mq_line on" in text
    assert "using mq_lease on" in text
    assert "Seq Scan on django_mq_queuedmessage" not in text


def test_claim_compares_no_rows_in_pairs(owner: Cursor) -> None:
    """The settings of a worker's session leave the planner nested loops alone for its joins."""
    messages = [row() for _ in range(20)]
    owner.execute(ONE_PLAN)
    plan = explained(owner, CLAIM_LINE, CLAIM)
    assert plan["Actual Rows"] == len(messages)
    assert _removed_in_joins(plan) == 0


def _removed_in_joins(plan: dict[str, Any]) -> int:
    mine = plan.get("Rows Removed by Join Filter", 0) * plan["Actual Loops"]
    return round(mine) + sum(map(_removed_in_joins, plan.get("Plans", ())))
