"""Claim: what is due, in order, never more than asked for, whatever the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from django_mq.models import QueuedMessage
from django_mq.store.claim import (
    BEGINNING,
    CLAIM,
    CLAIM_APART,
    PLACES,
    Claim,
    Lane,
    claim,
    lane_columns,
)
from django_mq.store.claim_lapsed import CLAIM_LAPSED
from django_mq.store.look import look
from tests.database import second_connection
from tests.rows import add, decide, stored
from tests.store.conftest import lock, take_lapsed
from tests.store.plans import generic_plan, plan

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]


def take(
    cursor: Cursor,
    *lanes: Lane,
    limit: int = 100,
    max_bytes: int = 1 << 22,
    further: Sequence[str] = (),
    apart: bool = False,
) -> Claim:
    return claim(
        cursor,
        lanes=lanes or [Lane("mail", 0)],
        claimer="me:7",
        lease=30.0,
        limit=limit,
        max_bytes=max_bytes,
        further=further,
        apart=apart,
    )


def ids(claimed: Claim) -> list[int]:
    return [row.id for row in claimed.rows]


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
def test_a_claim_tells_how_long_a_message_waited(
    cursor: Cursor, after: float, created: float
) -> None:
    """CAR-42: since it was due, so without its delay; or since it was made, if that is later."""
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
def test_what_is_due_in_each_state(cursor: Cursor, state: str) -> None:
    """PMQ-18, PMQ-24 as changed: one rule, at or before now; the same for look()."""
    given, due = STATES[state]
    message = add(**given)
    before = stored(message).attempts
    assert any(seen.due for seen in look(cursor)) is due
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
    """The second lane gets what the first leaves of the limit; unnamed lanes nothing."""
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


def test_several_claims_at_once_share_what_is_taken(cursor: Cursor) -> None:
    """Guarantee 15: each of them has no more than its share of the limit."""
    messages = [add(after=-60 + n) for n in range(9)]
    lane = Lane("mail", 0)
    taken = take(cursor, lane, limit=7, further=["me:8", "me:9"])
    assert ids(taken) == [message.pk for message in messages[:7]]
    assert [row.claimed_by for row in taken.rows] == ["me:7"] * 3 + ["me:8"] * 3 + ["me:9"]
    assert [stored(message).claimed_by for message in messages[:7]] == [
        row.claimed_by for row in taken.rows
    ]
    rest = take(cursor, lane, limit=7, further=["me:8", "me:9"])
    assert [row.claimed_by for row in rest.rows] == ["me:7"] * 2


@pytest.mark.parametrize(
    "at", ["2026-11-21 23:31:03.000001+00", "1999-12-31 23:59:59.999999+00", "1970-01-01 00:00+00"]
)
def test_a_mark_is_exact_to_the_microsecond(cursor: Cursor, at: str) -> None:
    """It goes through a float: one that was too low would take a row twice, or walk over it."""
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
    assert ids(take(cursor, Lane("mail", 0, *BEGINNING))) == [messages[0].pk, messages[1].pk]


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
    """KAF-15, guarantee 15: of `octet_length(payload::text)`; so also of what is compressed."""
    for n, size in enumerate(sizes):
        add(payload="x" * (size - 2), after=-60 + n)
    assert len(take(cursor, max_bytes=200).rows) == expected
    assert QueuedMessage.objects.filter(leased_until__isnull=True).count() == len(sizes) - expected


def test_what_was_over_the_limit_is_free_for_others(cursor: Cursor) -> None:
    first, second = add(payload="x" * 100), add(payload="x" * 100)
    assert ids(take(cursor, max_bytes=150)) == [first.pk]
    assert ids(take(cursor, max_bytes=150)) == [second.pk]


def test_locked_rows_are_skipped(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """PMQ-22: and not waited for; two claimers never get the same row."""
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
    """CAR-37 as changed: who comes at the same moment is in nobody's way."""
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
    assert {seen.queue: seen.due for seen in look(cursor) if seen.kind == "lane"} == {
        "mail": not paused,
        "post": True,
    }
    lanes = Lane("mail", 0), Lane("post", 0)
    assert ids(take(cursor, *lanes)) == ([other.pk] if paused else [due.pk, other.pk])
    assert [row.id for row in take_lapsed(cursor).taken] == ([] if paused else [lapsed.pk])


HOSTILE = [
    "enable_hashjoin",
    "enable_nestloop",
    "enable_indexscan",
    "enable_mergejoin",
    "enable_material",
    "enable_sort",
    "enable_seqscan",
]


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("off", [[], *[[name] for name in HOSTILE[:4]], HOSTILE[:3], HOSTILE])
def test_a_batch_is_never_exceeded_whatever_the_plan(
    cursor: Cursor, off: list[str], mode: str
) -> None:
    """Guarantee 15: with hash joins off one statement of a naive form took 19,490 rows."""
    cursor.execute(
        "insert into django_mq_queuedmessage (queue, type, payload, priority, processable_after)"
        " select 'mail', 'a', '\"12345678\"', n % 3, now() - interval '1 h' + n * interval '1 ms'"
        " from generate_series(1, 300) n"
    )
    cursor.execute("analyze django_mq_queuedmessage")
    for name in [*off, "enable_indexonlyscan", "enable_bitmapscan"] if off else []:
        cursor.execute(f"set {name} = off")
    cursor.execute(f"set plan_cache_mode = {mode}")
    cursor.connection.prepare_threshold = 0
    lanes = [Lane("mail", 2), Lane("mail", 1), Lane("mail", 0)]
    seen: set[int] = set()
    priorities: list[int] = []
    for limit, max_bytes, most in ((7, 1000, 7), (7, 30, 3), (1, 1, 1), (120, 10_000, 120)):
        rows = take(cursor, *lanes, limit=limit, max_bytes=max_bytes).rows
        assert len(rows) == most
        assert seen.isdisjoint(row.id for row in rows)
        seen.update(row.id for row in rows)
        priorities += [row.priority for row in rows]
    cursor.execute("select count(*) from django_mq_queuedmessage where leased_until is not null")
    assert cursor.fetchone() == (131,)
    assert priorities == [2] * 100 + [1] * 31
    cursor.execute("update django_mq_queuedmessage set leased_until = now() - interval '1 s'"
                   " where leased_until is not null")  # fmt: skip
    assert len(take_lapsed(cursor, limit=5).taken) == 5


def test_claims_of_one_moment_keep_apart(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """So that they meet no locks; what is left aside is nobody's, and the next claim's."""
    rows = [add(after=n - 60).pk for n in range(12)]
    assert ids(take(other.cursor(), limit=2, apart=True)) == rows[:2]  # and does not commit
    assert ids(take(cursor, limit=4, apart=True)) == rows[4:8]
    assert ids(take(cursor, limit=5, apart=True)) == [*rows[2:4], *rows[8:11]]  # 5 and 5 are none
    other.commit()
    assert ids(take(cursor, limit=4, apart=True)) == rows[11:]
    cursor.execute(
        "select count(*) from pg_locks where locktype = 'advisory'"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    assert cursor.fetchone() == (0,)


def test_claims_keep_apart_in_each_lane_and_behind_its_mark(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Priority first: if the lane cannot fill it from there, a claim takes what comes first."""
    low, high = ([add(after=n - 60, priority=priority).pk for n in range(6)] for priority in (0, 5))
    elsewhere = [add("elsewhere", after=n - 60).pk for n in range(4)]
    lanes = Lane("mail", 5), Lane("mail", 0)
    assert ids(take(other.cursor(), *lanes[1:], limit=1, apart=True)) == low[:1]
    assert ids(take(cursor, Lane("elsewhere", 0), limit=1, apart=True)) == elsewhere[:1]
    assert ids(take(cursor, *lanes, limit=2, apart=True)) == high[:2]
    ((lane, mark),) = take(cursor, *lanes[1:], limit=1).marks.items()
    assert mark[1] == low[1]
    assert ids(take(cursor, Lane(*lane, *mark), limit=2, apart=True)) == low[4:6]
    assert ids(take(other.cursor(), *lanes[:1], limit=1, apart=True)) == high[2:3]
    assert ids(take(cursor, *lanes, limit=3, apart=True)) == high[3:]


def test_what_is_not_due_is_no_reason_to_keep_apart(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    due = [add(after=n - 60).pk for n in range(3)]
    for n in range(4):
        add(after=60 + n)
    assert ids(take(other.cursor(), limit=1, apart=True)) == due[:1]
    assert ids(take(cursor, limit=2, apart=True)) == due[1:]


def test_more_claims_at_once_than_there_are_places(cursor: Cursor) -> None:
    rows = [add(after=n - 60).pk for n in range(PLACES + 4)]
    with ExitStack() as stack:
        for place in range(PLACES):
            busy = stack.enter_context(second_connection())
            busy.autocommit = False
            assert ids(take(busy.cursor(), limit=1, apart=True)) == [rows[place]]
        assert ids(take(cursor, limit=2, apart=True)) == rows[PLACES : PLACES + 2]


@pytest.fixture
def crowd(cursor: Cursor) -> Cursor:
    """Many rows of each kind, so that a bad plan shows."""
    cursor.execute(
        """
        insert into django_mq_queuedmessage
               (queue, type, payload, processable_after, leased_until, claimed_by, dead_at)
        select 'q' || n % 20, 'a', '{}', now() + (n - 10000) * interval '1 s',
               case when n % 100 = 0 then now() end, case when n % 100 = 0 then 'x:1' end,
               case when n % 3 = 0 and n % 100 <> 0 then now() end
          from generate_series(1, 20000) n
        """
    )
    cursor.execute("analyze django_mq_queuedmessage")
    return cursor


@pytest.mark.parametrize("statement", [CLAIM, CLAIM_APART])
@pytest.mark.parametrize("explain", [plan, generic_plan])
def test_the_plan_of_a_claim_names_its_index(
    crowd: Cursor, explain: Callable[..., str], statement: str
) -> None:
    text = explain(
        crowd,
        statement,
        **lane_columns([Lane("q1", 0), Lane("q2", 0)]),
        claimers="{me:1}",
        each=100,
        lease=30.0,
        limit=100,
        bytes=1 << 20,
        admitted=False,
    )
    assert "Index Scan using mq_claim" in text or "Bitmap Index Scan on mq_claim" in text
    assert "Seq Scan on django_mq_queuedmessage" not in text


@pytest.mark.parametrize("explain", [plan, generic_plan])
def test_the_plan_for_lapsed_rows_names_its_index(
    crowd: Cursor, explain: Callable[..., str]
) -> None:
    params = {"queues": ["q1", "q2"], "ats": [float("-inf")] * 2, "ids": [0, 0], "limit": 100}
    params.update(claimer="me:1", lease=30.0)
    text = explain(crowd, CLAIM_LAPSED, **params, bytes=4 << 20, skip_dead=False, admitted=False)
    assert "mq_lease" in text
    assert "Seq Scan on django_mq_queuedmessage" not in text
