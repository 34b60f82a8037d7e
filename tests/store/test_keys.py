"""Keys: what is first of its line, one at a time; what waits behind is parked, and freed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from django.db import transaction

from django_mq import cancel
from django_mq.messages import ClaimedRow, Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.queues import acting
from django_mq.store import chores, claim, keys, lapsed, settle
from django_mq.store import keyed as with_keys
from django_mq.store.claim import Claim, Lane
from django_mq.store.keyed import CLAIM_LINES, LOCK_LINES
from django_mq.store.keys import Line
from django_mq.store.looking import look
from django_mq.worker.database import ONE_PLAN
from tests.committing import quick_flush  # noqa: F401  (a fixture)
from tests.database import second_connection
from tests.rows import add, stored
from tests.store.conftest import lock
from tests.store.plans import generic_plan, plan

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]

INSERT = """
insert into django_mq_queuedmessage (queue, type, handler, key, payload, processable_after)
values ('mail', 'a', 'h', 'k', '{}', now() - interval '1 h')
returning id
"""


def keyed(key: str | None = "k", **given: Any) -> QueuedMessage:
    """Insert a message of handler h with an order key."""
    return add(**{"handler": "h", "key": key, **given})


def take(
    cursor: Cursor,
    *lanes: Lane,
    limit: int = 100,
    max_bytes: int = 1 << 22,
    skip_dead: bool = False,
) -> Claim:
    """Claim, and commit."""
    with cursor.connection.transaction():
        return take_open(cursor, *lanes, limit=limit, max_bytes=max_bytes, skip_dead=skip_dead)


def take_open(
    cursor: Cursor,
    *lanes: Lane,
    limit: int = 100,
    max_bytes: int = 1 << 22,
    skip_dead: bool = False,
) -> Claim:
    """Claim in the transaction that is open."""
    return with_keys.claim(
        cursor,
        lanes=lanes or [Lane("mail", 0)],
        claimer="me:7",
        lease=30.0,
        limit=limit,
        max_bytes=max_bytes,
        skip_dead=skip_dead,
    )


def ids(claimed: Claim) -> list[int]:
    return [row.id for row in claimed.rows]


def pks(*messages: QueuedMessage) -> list[int]:
    return [message.pk for message in messages]


def fences(claimed: Claim) -> list[Fence]:
    return [Fence(row.id, row.attempts, row.claimed_by) for row in claimed.rows]


def ack(cursor: Cursor, claimed: Claim, *, after: Callable[[], None] = lambda: None) -> None:
    """Settle all of a claim as a worker does: what follows is in the same transaction."""
    with cursor.connection.transaction():
        settle.ack(cursor, fences(claimed))
        keys.free_next(cursor, [line_of(row) for row in claimed.rows if row.key is not None])
        after()


def line_of(row: ClaimedRow) -> Line:
    assert row.key is not None
    return Line(row.queue, row.handler, row.key)


def blocked_by(*messages: QueuedMessage) -> list[int | None]:
    return [stored(message).blocked_by for message in messages]


def states(*messages: QueuedMessage) -> list[str]:
    found = {m.pk: m.state for m in QueuedMessage.objects.with_state()}
    return [str(found[message.pk]) for message in messages]


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
    cursor.execute("set statement_timeout = '5s'")
    assert sorted(ids(take(cursor))) == pks(first, plain)


def test_a_locked_head_stops_its_line_alone(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    head, _behind, goes = keyed(), keyed(), keyed("other")
    lock(other, head.pk)
    cursor.execute("set statement_timeout = '5s'")
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
    cursor.execute("set statement_timeout = '5s'")
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

    def run() -> None:
        with second_connection() as third, third.cursor() as mine, third.transaction():
            mine.execute(
                slow,
                {
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
                },
            )
            took.extend(sorted(row[0] for row in mine.fetchall()))

    thread = threading.Thread(target=run)
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


# ---- parked, and free again


def park(cursor: Cursor, **given: Any) -> tuple[QueuedMessage, list[QueuedMessage]]:
    """Return a head that waits, and three that are parked behind it."""
    head = keyed(**(given or {"after": 60}))
    behind = [keyed(), keyed(), keyed()]
    assert take(cursor).rows == []
    assert blocked_by(*behind) == [head.pk] * 3
    return head, behind


def test_a_head_that_becomes_due_takes_those_behind_it_along(cursor: Cursor) -> None:
    """Parked or not: a claim of the head goes on from row to row."""
    head, behind = park(cursor)
    QueuedMessage.objects.filter(pk=head.pk).update(
        processable_after=datetime(2000, 1, 1, tzinfo=UTC)
    )
    claimed = take(cursor, limit=3)
    assert ids(claimed) == pks(head, *behind[:2])
    assert blocked_by(*behind) == [None, None, head.pk]
    ack(cursor, claimed)
    assert blocked_by(behind[2]) == [None]
    assert ids(take(cursor)) == pks(behind[2])


def test_an_ack_frees_the_next_in_its_own_transaction(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    head, behind = park(cursor)
    QueuedMessage.objects.filter(pk=head.pk).update(
        processable_after=datetime(2000, 1, 1, tzinfo=UTC)
    )
    claimed = take(cursor, limit=1)

    def look_from_outside() -> None:
        seen = other.execute("select blocked_by from django_mq_queuedmessage where id = %s",
                             [behind[0].pk]).fetchone()  # fmt: skip
        assert seen == (head.pk,)

    ack(cursor, claimed, after=look_from_outside)
    assert blocked_by(*behind) == [None, head.pk, head.pk]


def test_freeing_nobody(cursor: Cursor) -> None:
    keys.free_next(cursor, [])
    keys.free_next(cursor, [Line("mail", "h", "k")])
    assert QueuedMessage.objects.count() == 0


def cancelled(cursor: Cursor, head: QueuedMessage) -> None:
    with transaction.atomic():
        assert cancel(id=head.pk).ids == (head.pk,)


def cancelled_by_hand(cursor: Cursor, head: QueuedMessage) -> None:
    assert acting.cancel(head.pk)


def purged(cursor: Cursor, head: QueuedMessage) -> None:
    assert acting.purge("mail", waiting=True, limit=1, type="the.head")


def discarded(cursor: Cursor, head: QueuedMessage) -> None:
    assert acting.discard(head.pk)


def forgotten(cursor: Cursor, head: QueuedMessage) -> None:
    assert chores.forget_dead(cursor, queue="mail", older_than=5, limit=10) == 1
    assert keys.free_stranded(cursor, skipping=[], limit=10) == 1


def deleted(cursor: Cursor, head: QueuedMessage) -> None:
    QueuedMessage.objects.filter(pk=head.pk).delete()
    assert keys.free_stranded(cursor, skipping=[], limit=10) == 1


DEAD = {"dead": -10, "dead_reason": "exhausted", "type": "the.head"}
DELAYED = {"after": 60, "type": "the.head"}


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (DELAYED, cancelled),
        (DELAYED, cancelled_by_hand),
        (DELAYED, purged),
        (DELAYED, deleted),
        (DEAD, discarded),
        (DEAD, purged),
        (DEAD, forgotten),
        (DEAD, deleted),
    ],
)
def test_whatever_removes_the_head_frees_the_next(
    cursor: Cursor, given: dict[str, Any], end: Callable[[Cursor, QueuedMessage], None]
) -> None:
    head, behind = park(cursor, **given)
    end(cursor, head)
    assert not QueuedMessage.objects.filter(pk=head.pk).exists()
    assert blocked_by(*behind) == [None, head.pk, head.pk]
    assert ids(take(cursor)) == pks(*behind)


def test_a_dead_head_that_is_requeued_goes_first(cursor: Cursor) -> None:
    head, behind = park(cursor, dead=-1, dead_reason="exhausted", attempts=20)
    assert acting.requeue(head.pk)
    assert ids(take(cursor)) == pks(head, *behind)


def test_a_head_that_is_run_now_goes_first(cursor: Cursor) -> None:
    head, behind = park(cursor)
    assert acting.run_now(behind[0].pk).ids == ()
    assert acting.run_now(head.pk)
    assert ids(take(cursor)) == pks(head, *behind)


def test_a_released_head_keeps_its_line_waiting(cursor: Cursor) -> None:
    messages = [keyed(), keyed()]
    claimed = take(cursor, limit=1)
    settle.release(cursor, fences(claimed))
    assert stored(messages[0]).attempts == 0
    assert ids(take(cursor)) == pks(*messages)


def test_one_that_is_parked_is_parked_behind_the_first(cursor: Cursor) -> None:
    """Whatever is cancelled in the midst of a line, the others wait on."""
    head, behind = park(cursor)
    assert acting.cancel(behind[0].pk)
    assert blocked_by(*behind[1:]) == [head.pk] * 2
    assert take(cursor).rows == []


def test_an_expired_head_blocks_as_a_dead_one_does(cursor: Cursor) -> None:
    head, behind = park(cursor, after=60, expires=-1)
    with cursor.connection.transaction():
        assert [row.id for row in chores.expire(cursor, limit=10)] == [head.pk]
        keys.free_next(cursor, [Line("mail", "h", "k")])
    assert take(cursor).rows == []
    assert blocked_by(*behind) == [head.pk] * 3
    assert ids(take(cursor, skip_dead=True)) == []  # they were parked again: it is a chore's now
    assert keys.free_stranded(cursor, skipping=["mail"], limit=10) == 1
    assert ids(take(cursor, skip_dead=True)) == pks(*behind)


# ---- a dead head may be passed


def test_a_dead_head_is_passed_where_the_queue_says_so(cursor: Cursor) -> None:
    dead = keyed(dead=-1)
    first, dead_too, last = keyed(), keyed(dead=-1), keyed()
    claimed = take(cursor, skip_dead=True)
    assert ids(claimed) == pks(first, last)
    assert blocked_by(dead, dead_too) == [None, None]


def test_one_that_dies_is_passed(cursor: Cursor) -> None:
    messages = [keyed(max_attempts=1), keyed(), keyed()]
    claimed = take(cursor, limit=1, skip_dead=True)
    with cursor.connection.transaction():
        settle.bury(cursor, fences(claimed)[0], reason="exhausted")
        keys.free_next(cursor, [Line("mail", "h", "k")])
    assert ids(take(cursor, skip_dead=True)) == pks(*messages[1:])


def test_a_requeued_one_does_not_overlap_those_that_passed_it(cursor: Cursor) -> None:
    dead, passing = keyed(dead=-1, attempts=20), keyed()
    claimed = take(cursor, skip_dead=True)
    assert ids(claimed) == [passing.pk]
    assert acting.requeue(dead.pk)
    late = keyed()
    assert take(cursor, skip_dead=True).rows == []
    ack(cursor, claimed)
    assert ids(take(cursor, skip_dead=True)) == pks(dead, late)


# ---- what a race left


def test_what_waits_for_one_that_is_gone_is_freed(cursor: Cursor) -> None:
    """Once for each line; what is parked behind one that is there stays."""
    lost = [keyed("a", blocked_by=2**40), keyed("a", blocked_by=2**40)]
    lost += [keyed("b", blocked_by=2**41)]
    _, behind = park(cursor)
    assert keys.free_stranded(cursor, skipping=[], limit=10) == 2
    assert blocked_by(*lost) == [None, 2**40, None]
    assert blocked_by(*behind) != [None] * 3
    claimed = take(cursor)
    assert ids(claimed) == pks(lost[0], lost[2], lost[1])
    ack(cursor, claimed)
    assert keys.free_stranded(cursor, skipping=[], limit=10) == 0


def test_many_that_wait_for_several_are_freed_in_pieces(cursor: Cursor) -> None:
    for n in range(5):
        keyed(f"k{n}", blocked_by=2**40 + n)
    assert keys.free_stranded(cursor, skipping=[], limit=3) == 3
    assert keys.free_stranded(cursor, skipping=[], limit=3) == 2


def test_what_waits_for_one_that_went_to_another_line_is_freed(cursor: Cursor) -> None:
    """An unrouted head got its handler: its line is that handler's now."""
    head = keyed(handler="", after=60)
    behind = keyed(handler="")
    assert take(cursor).rows == []
    assert blocked_by(behind) == [head.pk]
    QueuedMessage.objects.filter(pk=head.pk).update(handler="h")
    assert keys.free_stranded(cursor, skipping=[], limit=10) == 1
    assert ids(take(cursor)) == [behind.pk]


def test_parking_waits_for_nobody_and_is_seen_by_the_ack(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """A claim parks behind a head while that is being acked: it is skipped, and not lost."""
    head = keyed(after=60)
    behind = keyed()
    other.execute("delete from django_mq_queuedmessage where id = %s", [head.pk])
    cursor.execute("set statement_timeout = '5s'")
    assert take(cursor).rows == []
    assert blocked_by(behind) == [None]
    other.commit()
    assert ids(take(cursor)) == [behind.pk]


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


# ---- lapsed


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True, "key": None}])
def test_of_a_line_that_lapsed_the_first_is_charged_and_the_others_go_back(
    cursor: Cursor, line: dict[str, Any]
) -> None:
    """Guarantee 3: only the first can have run; whatever lapsed first, or has locks."""
    messages = [keyed(leased=-n, attempts=1, **line) for n in (1, 3, 2)]
    found = lapsed.claim_lapsed(
        cursor, queues=["mail"], claimer="me:8", lease=30.0, limit=10, max_bytes=1000
    )
    assert [row.id for row in found.taken] == [messages[0].pk]
    after = [stored(message) for message in messages]
    assert [m.attempts for m in after] == [2, 0, 0]
    assert [m.leased_until is None for m in after] == [False, True, True]
    assert [m.suspect for m in after] == [True, False, False]
    assert [a.message_id for a in FailedAttempt.objects.all()] == [messages[0].pk]
    if line["key"]:
        assert take(cursor).rows == []


def test_a_later_one_that_lapsed_goes_back_while_the_first_is_in_flight(cursor: Cursor) -> None:
    """Or locked: who has it runs it still."""
    first, second = keyed(leased=30, attempts=1), keyed(leased=-1, attempts=1)
    found = lapsed.claim_lapsed(
        cursor, queues=["mail"], claimer="me:8", lease=30.0, limit=10, max_bytes=1000
    )
    assert found == ([], [])
    assert [stored(m).attempts for m in (first, second)] == [1, 0]
    assert FailedAttempt.objects.count() == 0
