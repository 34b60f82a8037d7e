"""Claims from queues with order keys: the rows they take, in order, and those they park."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from django_mq.messages import Fence
from django_mq.models import QueuedMessage
from django_mq.store import settle
from django_mq.store.claim import Lane
from django_mq.store.claim_keyed import WINDOW
from django_mq.store.poll import poll
from tests.rows import insert_all, pks, stored
from tests.store.conftest import lock
from tests.store.keyed import INSERT, Cursor, ack, blocked_by, ids, keyed, states, take, take_open

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_key_is_taken_in_order_of_ids(cursor: Cursor) -> None:
    """Guarantee 8, KAF-2: regardless of the due times."""
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


def test_a_line_gets_no_more_than_its_limit(cursor: Cursor) -> None:
    a, b, c = [[keyed(key) for _ in range(3)] for key in "abc"]
    plain = keyed(None)
    with cursor.connection.transaction():
        taken = take_open(cursor, line_limits=lambda handlers: [2, 0, 9])
    assert ids(taken) == pks(a[0], c[0], plain, a[1], c[1], c[2])
    assert taken.left_lines
    assert ids(take(cursor)) == pks(*b)
    assert not take(cursor).left_lines


def test_claim_that_leaves_all_lines_looks_for_no_others(cursor: Cursor) -> None:
    """Others would wait for the same threads; the claim is not stuck behind them."""
    for n in range(WINDOW):
        keyed(f"k{n}")
    asked: list[int] = []

    def limits(handlers: Sequence[str]) -> Sequence[int]:
        asked.append(len(handlers))
        return [0] * len(handlers)

    with cursor.connection.transaction():
        taken = take_open(cursor, limit=5, line_limits=limits)
    assert (taken.rows, taken.left_lines, taken.stuck, asked) == ([], True, False, [5])


def test_several_claims_in_one_statement_share_the_rows(cursor: Cursor) -> None:
    """Guarantee 15: none gets more than its share of the limit."""
    a, b = [[keyed(key) for _ in range(4)] for key in "ab"]
    taken = take(cursor, limit=7, more_claimers=["me:8"])
    assert ids(taken) == pks(a[0], b[0], a[1], b[1], a[2], b[2], a[3])
    assert [row.claimed_by for row in taken.rows] == ["me:7"] * 4 + ["me:8"] * 3
    assert take(cursor, more_claimers=["me:8"]).rows == []


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
    """Rows that differ in one of them do not wait: each handler has its own order."""
    keyed("k", leased=30)
    waits, goes = keyed("k"), keyed(**{"key": "k", **other})
    lanes = Lane("mail", 0), Lane("post", 0)
    assert ids(take(cursor, *lanes)) == [goes.pk]
    assert stored(waits).leased_until is None


def test_texts_that_read_alike_together_are_two_lines(cursor: Cursor) -> None:
    """`a` + `b c` is not `a b` + `c`: names have no spaces, so each lock's text means one line."""
    messages = [keyed("b/c", handler="a"), keyed("c", handler="a/b")]
    assert ids(take(cursor)) == pks(*messages)


@pytest.mark.parametrize("key", ["null", 'a"b', "a\\b", "{a,b}", "a, b", "'", "ü@%s"])
def test_a_key_is_any_text(cursor: Cursor, key: str) -> None:
    """The array literals of the statements quote it."""
    first, second = keyed(key), keyed(key)
    claimed = take(cursor, limit=1)
    assert ids(claimed) == [first.pk]
    QueuedMessage.objects.filter(pk=second.pk).update(blocked_by=first.pk)
    ack(cursor, claimed)
    assert ids(take(cursor)) == [second.pk]


def test_lines_whose_head_waits_do_not_keep_a_small_claim_from_the_others(cursor: Cursor) -> None:
    """The first claim parks what it cannot take, and says that there may be more."""
    keyed("a", after=60)
    parked, other = keyed("a"), keyed("b")
    claimed = take(cursor, limit=1)
    assert (ids(claimed), claimed.unfinished) == ([], True)
    assert stored(parked).blocked_by is not None
    assert ids(take(cursor, limit=1)) == [other.pk]


BLOCKING: dict[str, tuple[dict[str, Any], str]] = {
    "delayed": ({"after": 60}, "delayed"),
    "retrying": ({"after": 60, "attempts": 1}, "retrying"),
    "held": ({"after": 60, "held": -1}, "held"),
    "dead": ({"dead": -1, "dead_reason": "exhausted"}, "dead"),
}


@pytest.mark.parametrize("state", BLOCKING)
def test_followers_of_a_waiting_head_are_parked(cursor: Cursor, state: str) -> None:
    """PMQ-44 for a key: none of it is taken, and all of it is out of the way of claims."""
    given, name = BLOCKING[state]
    head = keyed(**given)
    behind = [keyed(), keyed(priority=0), keyed()]
    other = keyed("other")
    assert ids(take(cursor)) == [other.pk]
    assert states(head, *behind) == [name, "blocked", "blocked", "blocked"]
    assert blocked_by(head, *behind) == [None, head.pk, head.pk, head.pk]
    assert {m.attempts for m in map(stored, behind)} == {0}
    assert not any(seen.due for seen in poll(cursor) if seen.kind == "lane")
    late = keyed()
    assert take(cursor).rows == []
    assert blocked_by(late) == [head.pk]


def test_claim_that_is_not_to_park_says_that_it_is_stuck(cursor: Cursor) -> None:
    line = [keyed("a") for _ in range(WINDOW + 2)]
    assert ids(take(cursor, limit=2)) == [line[0].pk, line[1].pk]
    assert stored(line[2]).blocked_by == line[0].pk
    QueuedMessage.objects.update(blocked_by=None)
    later = keyed("b")
    for _ in range(2):
        claimed = take(cursor, limit=2, park=False)
        assert (claimed.rows, claimed.unfinished, claimed.stuck) == ([], False, True)
    assert not QueuedMessage.objects.filter(blocked_by__isnull=False).exists()
    assert take(cursor, limit=2).unfinished
    assert ids(take(cursor, limit=2, park=False)) == [later.pk]


def test_claim_that_is_not_to_park_finds_all_lines_of_its_window(cursor: Cursor) -> None:
    """The first line, whose head waits, is all that a small claim looks at first."""
    keyed("a", after=60)
    behind, other = keyed("a"), keyed("b")
    claimed = take(cursor, limit=1, park=False)
    assert (ids(claimed), claimed.stuck) == ([other.pk], False)
    assert stored(behind).blocked_by is None
    rest = take(cursor, limit=5, park=False)
    assert (rest.rows, rest.stuck) == ([], False)


def test_line_that_another_session_claims_at_this_moment_is_not_parked(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """Locking its head may wait for the other's ack, and the ack for this claim."""
    line = [keyed("a") for _ in range(WINDOW)]
    with other.transaction():
        assert ids(take_open(other.cursor(), limit=2, park=False)) == [line[0].pk, line[1].pk]
        claimed = take(cursor)
    assert (claimed.rows, claimed.unfinished, claimed.stuck) == ([], False, True)
    assert not QueuedMessage.objects.filter(blocked_by__isnull=False).exists()
    keyed("a")
    keyed("a")  # so that the window is full again
    assert take(cursor).unfinished
    assert blocked_by(line[2]) == [line[0].pk]


def test_followers_of_a_head_in_flight_are_not_parked(cursor: Cursor) -> None:
    """It will resume soon: no row is written for that."""
    keyed(leased=30)
    behind = keyed()
    assert take(cursor).rows == []
    assert blocked_by(behind) == [None]


def test_no_row_of_a_line_is_taken_while_another_has_a_claim(cursor: Cursor) -> None:
    """A lower id committed late does not overlap a higher one that runs."""
    late = keyed()
    keyed(leased=30)
    assert take(cursor).rows == []
    assert stored(late).leased_until is None
    QueuedMessage.objects.filter(leased_until__isnull=False).delete()
    assert ids(take(cursor)) == [late.pk]


def test_a_lower_id_that_is_committed_late_goes_first_next_time(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """As above, with the insert held open: its row is seen once committed, and never overlaps."""
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


@pytest.mark.parametrize("locked", ["head", "behind"])
def test_a_locked_row_stops_its_line_alone_however_small_the_claim(
    cursor: Cursor, other: psycopg.Connection[Any], locked: str
) -> None:
    """A producer that changes a waiting message, say, and whose transaction stays open."""
    head = keyed("a", after=-60 if locked == "head" else 60)
    behind, goes = keyed("a"), keyed("b")
    lock(other, (head if locked == "head" else behind).pk)
    cursor.execute("set statement_timeout = '60s'")
    assert ids(take(cursor, limit=1)) == [goes.pk]
    other.rollback()
    assert ids(take(cursor, limit=1)) == ([head.pk] if locked == "head" else [])


@pytest.mark.parametrize("keys", [WINDOW + 1, 50, 0])
def test_locked_rows_that_fill_a_window_do_not_stop_other_lines(
    cursor: Cursor, other: psycopg.Connection[Any], keys: int
) -> None:
    """An import may change hundreds of waiting messages in one long transaction."""
    numbers = range(WINDOW + 1)
    names = [f"k{n % keys}" if keys else None for n in numbers]
    given = ({"handler": "h", "key": name, "after": -60} for name in names)
    locked, goes = insert_all(given), keyed("other")
    lock(other, *locked)
    assert ids(take(cursor, limit=5)) == [goes.pk]
    assert (nothing := take(cursor, limit=5)).rows == []
    assert not nothing.stuck
    other.rollback()
    assert ids(take(cursor, limit=5)) == locked[:5]


def test_heads_that_an_open_transaction_removes_do_not_stop_other_lines(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """It may be long: a producer cancels messages. Those behind them cannot be parked meanwhile."""
    heads = [keyed("a"), keyed("b")]
    insert_all({"handler": "h", "key": "ab"[n % 2], "after": -60} for n in range(WINDOW + 1))
    plain, goes = keyed(None), keyed("other")
    other.execute("delete from django_mq_queuedmessage where id = any(%s)", [pks(*heads)])
    assert ids(take(cursor, limit=5)) == [plain.pk, goes.pk]
    assert (nothing := take(cursor, limit=5)).rows == []
    assert not nothing.stuck
    other.commit()
    assert len(take(cursor, limit=5).rows) == 5


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_cuts_from_the_end(cursor: Cursor, limit: int) -> None:
    messages = [keyed() for _ in range(4)]
    assert ids(take(cursor, limit=limit)) == pks(*messages[:limit])


@pytest.mark.parametrize(("maximum", "expected"), [(25, 2), (5, 1), (1000, 4)])
def test_bytes_cut_from_the_end(cursor: Cursor, maximum: int, expected: int) -> None:
    """Guarantee 15: at least one is taken, and never one without those before it."""
    messages = [keyed(payload="x" * 10) for _ in range(4)]
    assert ids(take(cursor, max_bytes=maximum)) == pks(*messages[:expected])


def test_a_line_with_several_priorities_keeps_its_order(cursor: Cursor) -> None:
    """A key is stronger than a priority; the line is taken when its first is seen."""
    first, urgent = keyed(), keyed(priority=9)
    plain = keyed(None, priority=5)
    lanes = Lane("mail", 9), Lane("mail", 5), Lane("mail", 0)
    assert ids(take(cursor, *lanes)) == pks(first, plain, urgent)


def test_room_is_used_up(cursor: Cursor) -> None:
    """However the room is divided among the lines."""
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
