"""Claims from queues with order keys, and their plans."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from django_mq.executor.statements import ONE_PLAN
from django_mq.messages import Fence
from django_mq.models import QueuedMessage
from django_mq.store import claim, settle
from django_mq.store import claim_keyed as with_keys
from django_mq.store.claim import Lane
from django_mq.store.claim_keyed import CLAIM_LINES, LOCK_LINES
from django_mq.store.look import look
from tests.database import second_connection
from tests.rows import stored
from tests.store.conftest import lock
from tests.store.keyed import (
    INSERT,
    Cursor,
    ack,
    blocked_by,
    ids,
    keyed,
    pks,
    states,
    take,
    take_open,
)
from tests.store.plans import generic_plan, plan

pytestmark = pytest.mark.django_db(transaction=True)


# ---- a claim


def test_a_key_is_taken_in_order_of_ids(cursor: Cursor) -> None:
    """Guarantee 8, KAF-2: whatever was due first."""
    messages = [keyed(after=-n) for n in range(1, 6)]
    claimed = take(cursor)
    assert ids(claimed) == pks(*messages)
    assert {row.attempts for row in claimed.rows} == {1}
    assert take(cursor).rows == []


def test_heads_come_first_and_each_key_gets_its_share(cursor: Cursor) -> None:
    """A long line leaves room for the others; a line alone gets all of it."""
    a = [keyed("a") for _ in range(10)]
    b = [keyed("b") for _ in range(10)]
    assert ids(take(cursor, limit=4)) == pks(a[0], b[0], a[1], b[1])
    keyed("c")
    settle.release(cursor, [Fence(m.pk, 1, "me:7") for m in (*a[:2], *b[:2])])
    QueuedMessage.objects.exclude(key="a").delete()
    assert ids(take(cursor, limit=8)) == pks(*a[:8])


def test_messages_without_a_key_come_along(cursor: Cursor) -> None:
    plain = [keyed(None, after=-50), keyed(None, after=-30)]
    lined = [keyed("k", after=-40), keyed("k", after=-60)]
    claimed = take(cursor)
    assert ids(claimed) == pks(lined[0], plain[0], plain[1], lined[1])
    assert claimed.rows[0].key == "k"


@pytest.mark.parametrize(
    "other",
    [{"key": "other"}, {"handler": "other"}, {"queue": "post"}],
    ids=["key", "handler", "queue"],
)
def test_a_line_is_queue_handler_and_key(cursor: Cursor, other: dict[str, Any]) -> None:
    """What differs in one of them does not wait: each handler has its own order."""
    keyed("k", leased=30)
    waits, goes = keyed("k"), keyed(**{"key": "k", **other})
    lanes = Lane("mail", 0), Lane("post", 0)
    assert ids(take(cursor, *lanes)) == [goes.pk]
    assert stored(waits).leased_until is None


def test_texts_that_read_alike_together_are_two_lines(cursor: Cursor) -> None:
    """`a` + `b c` is not `a b` + `c`: names have no spaces, so the lock's text is one line's."""
    messages = [keyed("b/c", handler="a"), keyed("c", handler="a/b")]
    assert ids(take(cursor)) == pks(*messages)


BLOCKING: dict[str, tuple[dict[str, Any], str]] = {
    "delayed": ({"after": 60}, "delayed"),
    "retrying": ({"after": 60, "attempts": 1}, "retrying"),
    "held": ({"after": 60, "held": -1}, "held"),
    "dead": ({"dead": -1, "dead_reason": "exhausted"}, "dead"),
}


@pytest.mark.parametrize("state", BLOCKING)
def test_what_is_behind_a_head_that_waits_is_parked(cursor: Cursor, state: str) -> None:
    """PMQ-44 of a key: nothing of it is taken, all of it is out of the way of claims."""
    given, name = BLOCKING[state]
    head = keyed(**given)
    behind = [keyed(), keyed(priority=0), keyed()]
    other = keyed("other")
    assert ids(take(cursor)) == [other.pk]
    assert states(head, *behind) == [name, "blocked", "blocked", "blocked"]
    assert blocked_by(head, *behind) == [None, head.pk, head.pk, head.pk]
    assert {m.attempts for m in map(stored, behind)} == {0}
    assert not any(seen.due for seen in look(cursor) if seen.kind == "lane")
    late = keyed()
    assert take(cursor).rows == []
    assert blocked_by(late) == [head.pk]


def test_what_is_behind_a_head_in_flight_is_left_alone(cursor: Cursor) -> None:
    """It will go on soon: no row is written for that."""
    keyed(leased=30)
    behind = keyed()
    assert take(cursor).rows == []
    assert blocked_by(behind) == [None]


def test_no_row_of_a_line_is_taken_while_another_has_a_claim(cursor: Cursor) -> None:
    """A lower id that was committed late does not overlap a higher one that runs."""
    late = keyed()
    keyed(leased=30)
    assert take(cursor).rows == []
    assert stored(late).leased_until is None
    QueuedMessage.objects.filter(leased_until__isnull=False).delete()
    assert ids(take(cursor)) == [late.pk]


def test_a_lower_id_that_is_committed_late_goes_first_next_time(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """As above, with the insert held open: it is seen when it is there, and never overlaps."""
    [low] = other.execute(INSERT).fetchone()  # type: ignore[misc]
    high, next_ = keyed(), keyed()
    first = take(cursor, limit=1)
    assert ids(first) == [high.pk]
    other.commit()
    assert take(cursor).rows == []
    ack(cursor, first)
    assert ids(take(cursor)) == [low, next_.pk]


def test_a_gap_ends_the_run_of_a_line(cursor: Cursor) -> None:
    first, delayed, third = keyed(), keyed(after=60), keyed()
    assert ids(take(cursor)) == [first.pk]
    assert blocked_by(delayed, third) == [None, None]


def test_a_locked_row_ends_the_run_of_its_line(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    first, second, _third = keyed(), keyed(), keyed()
    plain = keyed(None)
    lock(other, second.pk)
    cursor.execute("set statement_timeout = '60s'")
    assert sorted(ids(take(cursor))) == pks(first, plain)


def test_a_locked_head_stops_its_line_alone(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    head, _behind, goes = keyed(), keyed(), keyed("other")
    lock(other, head.pk)
    cursor.execute("set statement_timeout = '60s'")
    assert ids(take(cursor)) == [goes.pk]
    other.rollback()
    assert ids(take(cursor)) == pks(head, _behind)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_cuts_from_the_end(cursor: Cursor, limit: int) -> None:
    messages = [keyed() for _ in range(4)]
    assert ids(take(cursor, limit=limit)) == pks(*messages[:limit])


@pytest.mark.parametrize(("most", "expected"), [(25, 2), (5, 1), (1000, 4)])
def test_bytes_cut_from_the_end(cursor: Cursor, most: int, expected: int) -> None:
    """Guarantee 15: one is always taken, and never one without those before it."""
    messages = [keyed(payload="x" * 10) for _ in range(4)]
    assert ids(take(cursor, max_bytes=most)) == pks(*messages[:expected])


def test_a_line_with_several_priorities_keeps_its_order(cursor: Cursor) -> None:
    """A key is stronger than a priority; the line is taken when its first is seen."""
    first, urgent = keyed(), keyed(priority=9)
    plain = keyed(None, priority=5)
    lanes = Lane("mail", 9), Lane("mail", 5), Lane("mail", 0)
    assert ids(take(cursor, *lanes)) == pks(first, plain, urgent)


def test_room_is_used_up(cursor: Cursor) -> None:
    """However it divides among the lines."""
    for _ in range(4):
        keyed("a")
        keyed("b")
        keyed("c")
    assert len(take(cursor, limit=7).rows) == 7


def test_a_paused_queue_gives_nothing(cursor: Cursor) -> None:
    keyed()
    with cursor.connection.transaction():
        cursor.execute("insert into django_mq_queuestate (queue, paused_at) values ('mail', now())")
    assert take(cursor).rows == []


def test_unrouted_messages_have_lines_too(cursor: Cursor) -> None:
    first, second = keyed(handler=""), keyed(handler="")
    assert ids(take(cursor, limit=1)) == [first.pk]
    assert take(cursor).rows == []
    assert stored(second).leased_until is None


# ---- claims at the same moment


def test_claims_at_one_moment_never_share_a_line(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Guarantee 8: while one claim is not committed, another passes its lines by."""
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
    """The snapshot follows the lock: what was claimed and committed in between has a claim."""
    keyed()
    theirs = other.cursor()
    theirs.execute("set transaction isolation level read committed")
    given = {
        **claim.lane_columns([Lane("mail", 0)]),
        "limit": 100,
        "window": 1000,
        "skip_dead": False,
        "admitted": False,
    }
    cursor.execute("begin")
    cursor.execute(LOCK_LINES, given)
    assert len(cursor.fetchall()) == 1
    theirs.execute(LOCK_LINES, given)
    assert theirs.fetchall() == []  # the lock is held
    cursor.execute("rollback")
    theirs.execute(LOCK_LINES, given)
    [line] = theirs.fetchall()  # seen as free, and then taken by a claim without locks
    cursor.execute(
        "update django_mq_queuedmessage"
        " set leased_until = now() + interval '30 s', claimed_by = 'x:1'"
    )
    theirs.execute(
        CLAIM_LINES,
        {
            **given,
            "line_queues": [line[0]],
            "line_handlers": [line[1]],
            "line_keys": [line[2]],
            "line_places": [line[3]],
            "claimer": "me:1",
            "lease": 30.0,
            "bytes": 1 << 20,
        },
    )
    assert [row[0] for row in theirs.fetchall()] == [None]


def claimed_by(statement: str) -> list[int]:
    """Claim the line (mail, h, k) by `statement`, on a connection of its own; return the ids."""
    given = {
        **claim.lane_columns([Lane("mail", 0)]),
        "limit": 100,
        "window": 1000,
        "skip_dead": False,
        "admitted": False,
        "line_queues": ["mail"],
        "line_handlers": ["h"],
        "line_keys": ["k"],
        "line_places": [1],
        "claimer": "me:1",
        "lease": 30.0,
        "bytes": 1 << 20,
    }
    with second_connection() as third, third.cursor() as mine, third.transaction():
        mine.execute(statement, given)
        return sorted(row[0] for row in mine.fetchall())


def test_a_head_that_changes_between_snapshot_and_lock_is_taken_all_the_same(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Trap 1: joined by ctid, the claim took what is behind a head that was updated meanwhile.

    The statement is stopped between its snapshot and its locks by a row of another table.
    """
    messages = [keyed(), keyed(), keyed()]
    slow = CLAIM_LINES.replace(
        "), locked as materialized (",
        "), stop as materialized (select pg_advisory_xact_lock(4711)), locked as materialized (",
    ).replace(
        "      from (select * from chosen order by place, n) chosen\n",
        "      from stop cross join (select * from chosen order by place, n) chosen\n",
    )
    assert "from stop cross join (select" in slow
    other.execute("select pg_advisory_xact_lock(4711)")
    took: list[int] = []

    thread = threading.Thread(target=lambda: took.extend(claimed_by(slow)))
    thread.start()
    for _ in range(3000):
        cursor.execute(
            "select 1 from pg_stat_activity where wait_event = 'advisory'"
            " and datname = current_database()"
        )
        if cursor.fetchone():
            break
        cursor.execute("select pg_sleep(0.01)")
    cursor.execute(
        "update django_mq_queuedmessage set last_error = 'touched' where id = %s", [messages[0].pk]
    )
    other.rollback()
    thread.join(30)
    assert took == pks(*messages)


# ---- long lines


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(with_keys, "WINDOW", 10)
    return 10


def test_a_long_line_is_parked_out_of_the_way(cursor: Cursor, small_window: int) -> None:
    """A million messages on one key do not slow the others: a claim looks at `WINDOW` rows."""
    long = [keyed("long", after=-60) for _ in range(30)]
    other = keyed("other", after=-1)
    order: list[int] = []
    claims = 0
    while claimed := take(cursor, limit=4):
        if not claimed.rows:
            break
        claims += 1
        if other.pk in ids(claimed):
            assert claims <= 4  # three windows are before it
        order += [id for id in ids(claimed) if id != other.pk]
        ack(cursor, claimed)
    assert order == pks(*long)
    assert QueuedMessage.objects.count() == 0


def test_another_is_reached_while_a_long_line_runs(cursor: Cursor, small_window: int) -> None:
    """The first of it is in flight for long: what follows is parked, window by window."""
    [head, *_] = [keyed("long", after=-60) for _ in range(30)]
    other = keyed("other", after=-1)
    assert ids(take(cursor, limit=1)) == [head.pk]
    found: list[int] = []
    for _ in range(4):
        found += ids(take(cursor, limit=4))
    assert found == [other.pk]


# ---- the plan


@pytest.fixture
def crowd(cursor: Cursor) -> Cursor:
    """Many keys, one of them with a dead head and a long line behind it."""
    cursor.execute(
        """
        insert into django_mq_queuedmessage
               (queue, type, handler, key, payload, processable_after, leased_until, claimed_by,
                dead_at)
        select 'mail', 'a', 'h', case when n <= 20000 then 'long' else 'k' || n % 1000 end, '{}',
               now() - interval '1 h' + n * interval '1 ms',
               case when n % 1000 = 999 then now() + interval '1 h' end,
               case when n % 1000 = 999 then 'x:1' end,
               case when n = 1 then now() end
          from generate_series(1, 22000) n
        """
    )
    cursor.execute("update django_mq_queuedmessage set leased_until = null, claimed_by = null"
                   " where key = 'long'")  # fmt: skip
    cursor.execute("analyze django_mq_queuedmessage")
    return cursor


def given_for(**more: Any) -> dict[str, Any]:
    return {
        **claim.lane_columns([Lane("mail", 0)]),
        "limit": 100,
        "window": 1000,
        "skip_dead": False,
        "admitted": False,
        **more,
    }


@pytest.mark.parametrize("setting", ["", ONE_PLAN])
@pytest.mark.parametrize("explain", [plan, generic_plan])
@pytest.mark.parametrize("statement", [LOCK_LINES, CLAIM_LINES], ids=["lock", "claim"])
def test_the_plans_of_a_claim_name_their_indexes(
    crowd: Cursor, statement: str, explain: Callable[..., str], setting: str
) -> None:
    if setting:
        crowd.execute(setting)
    params = given_for(window=100)  # a whole window may well be looked up by a scan of this table
    if statement == CLAIM_LINES:
        params |= {
            "line_queues": ["mail"] * 3,
            "line_handlers": ["h"] * 3,
            "line_keys": ["k1", "k2", "long"],
            "line_places": [1, 2, 3],
            "claimer": "me:1",
            "lease": 30.0,
            "bytes": 1 << 20,
        }
    text = explain(crowd, statement, **params)
    assert "using mq_claim on" in text
    assert "using mq_key on" in text
    assert "using mq_key_leased on" in text
    if setting or explain is plan:
        assert "Seq Scan on django_mq_queuedmessage" not in text


def touched(cursor: Cursor) -> int:
    """Return how many buffers a claim touches; nothing is taken."""
    total = 0
    with cursor.connection.transaction(force_rollback=True):
        for statement in (LOCK_LINES, CLAIM_LINES):
            params = given_for(
                line_queues=[], line_handlers=[], line_keys=[], line_places=[],
                claimer="me:1", lease=30.0, bytes=1 << 20,
            )  # fmt: skip
            cursor.execute("explain (analyze, buffers, format json) " + statement, params)
            [[document]] = cursor.fetchall()
            found = document if isinstance(document, list) else json.loads(document)
            total += found[0]["Plan"]["Shared Hit Blocks"] + found[0]["Plan"]["Shared Read Blocks"]
    return total


def vacuum(cursor: Cursor) -> None:
    """Remove all that is dead: with nobody about whose snapshot would keep it."""
    cursor.execute(
        """
        select pg_terminate_backend(pid, 10000)
          from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()
           and (backend_xmin is not null or backend_xid is not null)
        """
    )
    cursor.execute("vacuum (analyze, index_cleanup on) django_mq_queuedmessage")


def test_followers_of_a_dead_head_cost_a_claim_nothing_once_parked(crowd: Cursor) -> None:
    """By the buffers that a claim touches, since that is the same on a busy machine."""
    crowd.execute("delete from django_mq_queuedmessage where key <> 'long'")
    vacuum(crowd)
    for _ in range(20_000 // with_keys.WINDOW + 1):
        assert take(crowd).rows == []
    crowd.execute("select count(*) from django_mq_queuedmessage where blocked_by is null")
    assert crowd.fetchone() == (1,)  # the head
    for _ in range(5):
        keyed("other", after=-1)
    vacuum(crowd)
    with_line = touched(crowd)
    crowd.execute("delete from django_mq_queuedmessage where key = 'long'")
    vacuum(crowd)
    without = touched(crowd)
    assert with_line <= 2 * without + 20
