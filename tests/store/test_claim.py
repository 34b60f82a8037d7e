"""Claims take due messages, in order, never more than requested."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from django_mq.models import QueuedMessage
from django_mq.store.claim import LANE_START, Lane
from django_mq.store.poll import poll
from tests.rows import add, decide, stored
from tests.store.claiming import Cursor, ids, take
from tests.store.conftest import lock, take_lapsed

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_claim_is_a_lease_for_one_attempt(cursor: Cursor) -> None:
    """CAR-15: until now + lease, by the database's clock; the first delivery has attempt 1."""
    message = add(handler="h", payload={"a": 1}, metadata={"b": 2}, held=-5)
    (row,) = take(cursor).rows
    assert (row.id, row.queue, row.type, row.handler) == (
        message.pk, "mail", "shop.orders.placed", "h"
    )  # fmt: skip
    assert (json.loads(row.payload), json.loads(row.metadata)) == ({"a": 1}, {"b": 2})
    assert (row.attempts, row.max_attempts, row.claimed_by) == (1, 20, "me:7")
    assert (row.key, row.priority, row.retry, row.suspect) == (None, 0, None, False)
    assert row.held_for is not None
    assert row.held_for >= 5
    stored(message)
    assert (message.attempts, message.claimed_by) == (1, "me:7")
    assert message.leased_until == row.claimed_at + timedelta(seconds=30)
    assert message.processable_after < row.claimed_at


@pytest.mark.parametrize(("after", "created"), [(-10, -600), (-600, -10)])
def test_claim_returns_the_wait_of_a_message(cursor: Cursor, after: float, created: float) -> None:
    """CAR-42: since it was due, so without its delay; or since its creation, if that is later."""
    add(after=after, created=created)
    (row,) = take(cursor).rows
    assert 10 <= row.waited < 70


STATES: dict[str, tuple[dict[str, Any], bool]] = {
    "processable": ({}, True),
    "due exactly now": ({"after": 0}, True),
    "delayed": ({"after": 60}, False),
    "retrying": ({"after": 60, "attempts": 2}, False),
    "retry that is due": ({"attempts": 2}, True),
    "leased": ({"leased": 30, "attempts": 1}, False),
    "lapsed": ({"leased": -1, "attempts": 1}, False),
    "blocked": ({"blocked_by": 1}, False),
    "held": ({"held": -10, "after": 5}, False),
    "held, due": ({"held": -10}, True),
    "expired": ({"expires": -1}, True),
    "dead": ({"dead": -1}, False),
}


@pytest.mark.parametrize("state", STATES)
def test_due_rows_of_each_state_are_claimed(cursor: Cursor, state: str) -> None:
    """PMQ-18, PMQ-24 as changed: one rule, at or before now; the same for look()."""
    given, due = STATES[state]
    message = add(**given)
    before = stored(message).attempts
    assert any(seen.due for seen in poll(cursor)) is due
    assert ids(take(cursor)) == ([message.pk] if due else [])
    assert stored(message).attempts == before + due


def test_order(cursor: Cursor) -> None:
    """CAR-17, PMQ-41: due time, then id; lanes one after another."""
    late = add(after=-10)
    early = add(after=-50)
    twins = [add(after=-30), add(after=-30)]
    QueuedMessage.objects.filter(pk__in=[m.pk for m in twins]).update(
        processable_after=twins[0].processable_after
    )
    urgent = add(after=-5, priority=9)
    other = add("post", after=-99)
    claimed = take(cursor, Lane("mail", 9), Lane("mail", 0), Lane("post", 0))
    assert ids(claimed) == [
        urgent.pk, early.pk, twins[0].pk, twins[1].pk, late.pk, other.pk
    ]  # fmt: skip
    assert claimed.marks == {
        ("mail", 9): (stored(urgent).processable_after.timestamp(), urgent.pk),
        ("mail", 0): (stored(late).processable_after.timestamp(), late.pk),
        ("post", 0): (stored(other).processable_after.timestamp(), other.pk),
    }


def test_lanes_are_strictly_preferred(cursor: Cursor) -> None:
    """The second lane gets the rest of the first lane's limit; unnamed lanes get nothing."""
    for _ in range(3):
        add("post", priority=50)
        add("mail")
        add("mail", priority=100)
        add("spam")
    lanes = [Lane("mail", 0), Lane("post", 50)]
    rows = take(cursor, *lanes, limit=4).rows
    assert [(row.queue, row.priority) for row in rows] == [("mail", 0)] * 3 + [("post", 50)]
    assert len(take(cursor, *lanes).rows) == 2
    assert take(cursor, *lanes).rows == []


def test_several_claimers_share_one_claim(cursor: Cursor) -> None:
    """Guarantee 15: none gets more than its share of the limit."""
    messages = [add(after=-60 + n) for n in range(9)]
    lane = Lane("mail", 0)
    taken = take(cursor, lane, limit=7, more_claimers=["me:8", "me:9"])
    assert ids(taken) == [message.pk for message in messages[:7]]
    assert [row.claimed_by for row in taken.rows] == ["me:7"] * 3 + ["me:8"] * 3 + ["me:9"]
    assert [stored(message).claimed_by for message in messages[:7]] == [
        row.claimed_by for row in taken.rows
    ]
    rest = take(cursor, lane, limit=7, more_claimers=["me:8", "me:9"])
    assert [row.claimed_by for row in rest.rows] == ["me:7"] * 2


@pytest.mark.parametrize(
    "at", ["2026-11-21 23:31:03.000001+00", "1999-12-31 23:59:59.999999+00", "1970-01-01 00:00+00"]
)
def test_a_mark_is_exact_to_the_microsecond(cursor: Cursor, at: str) -> None:
    """It passes through a float: if too low, a row would be taken twice; if too high, skipped."""
    first, second = add(), add()
    moment = datetime.fromisoformat(at)
    QueuedMessage.objects.update(processable_after=moment)
    mark = take(cursor, Lane("mail", 0), limit=1).marks["mail", 0]
    assert mark == (moment.timestamp(), first.pk)
    cursor.execute(
        "update django_mq_queuedmessage set leased_until = null, claimed_by = null where id = %s",
        (first.pk,),
    )
    assert ids(take(cursor, Lane("mail", 0, *mark))) == [second.pk]


def test_a_mark_is_where_the_scan_begins(cursor: Cursor) -> None:
    messages = [add(after=-60 + n) for n in range(4)]
    at = messages[1].processable_after.timestamp()
    assert ids(take(cursor, Lane("mail", 0, at, messages[1].pk))) == [
        messages[2].pk, messages[3].pk
    ]  # fmt: skip
    assert ids(take(cursor, Lane("mail", 0, *LANE_START))) == [messages[0].pk, messages[1].pk]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100, 100, 100, 100], 2),
        ([201, 10], 1),
        ([10, 201, 10], 1),
        ([10, 189, 10], 2),
        ([5000], 1),
    ],
)
def test_bytes_are_limited_but_one_message_is_always_taken(
    cursor: Cursor, sizes: list[int], expected: int
) -> None:
    """KAF-15, guarantee 15: of `octet_length(payload::text)`, even if the value is compressed."""
    for n, size in enumerate(sizes):
        add(payload="x" * (size - 2), after=-60 + n)
    assert len(take(cursor, max_bytes=200).rows) == expected
    assert QueuedMessage.objects.filter(leased_until__isnull=True).count() == len(sizes) - expected


def test_row_over_the_byte_limit_stays_free(cursor: Cursor) -> None:
    first, second = add(payload="x" * 100), add(payload="x" * 100)
    assert ids(take(cursor, max_bytes=150)) == [first.pk]
    assert ids(take(cursor, max_bytes=150)) == [second.pk]


def test_locked_rows_are_skipped(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """PMQ-22: skipped without a wait; two claimers never get the same row."""
    first, second = add(after=-60), add(after=-50)
    lock(other, first.pk)
    cursor.execute("set statement_timeout = '60s'")
    assert ids(take(cursor)) == [second.pk]
    assert take(cursor).rows == []
    other.rollback()
    assert ids(take(cursor)) == [first.pk]


def test_claims_side_by_side_take_different_rows(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """CAR-37 as changed: concurrent claims do not block each other."""
    messages = {add().pk for _ in range(6)}
    mine = ids(take(cursor, limit=3))
    theirs = ids(take(other.cursor(), limit=10))
    assert len(mine) == len(theirs) == 3
    assert {*mine, *theirs} == messages


PAUSES: dict[str, tuple[dict[str, Any], bool]] = {
    "for good": ({"paused": -1}, True),
    "until later": ({"paused": -1, "until": 60}, True),
    "until before": ({"paused": -10, "until": -1}, False),
    "resumed": ({}, False),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_a_paused_queue_gives_nothing(cursor: Cursor, pause: str) -> None:
    given, paused = PAUSES[pause]
    decide("mail", **given)
    due, lapsed = add(), add(leased=-1, attempts=1)
    other = add("post")
    assert {seen.queue: seen.due for seen in poll(cursor) if seen.kind == "lane"} == {
        "mail": not paused,
        "post": True,
    }
    lanes = Lane("mail", 0), Lane("post", 0)
    assert ids(take(cursor, *lanes)) == ([other.pk] if paused else [due.pk, other.pk])
    assert [row.id for row in take_lapsed(cursor).taken] == ([] if paused else [lapsed.pk])
