"""Keys: the first of a line, one at a time; followers are parked, and freed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from django.db import transaction

from django_mq import cancel
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.queues import actions as acting
from django_mq.store import claim_lapsed as lapsed
from django_mq.store import expiry, keys, pruning, settle
from django_mq.store.keys import KeyLine
from tests.rows import add, pks, stored
from tests.store.conftest import take_lapsed
from tests.store.keyed import (
    Cursor,
    ack,
    blocked_by,
    fences,
    ids,
    keyed,
    take,
)

pytestmark = pytest.mark.django_db(transaction=True)


# ---- parked, and free again


def park(cursor: Cursor, **given: Any) -> tuple[QueuedMessage, list[QueuedMessage]]:
    """Return a waiting head, and three messages parked behind it."""
    head = keyed(**(given or {"after": 60}))
    behind = [keyed(), keyed(), keyed()]
    assert take(cursor).rows == []
    assert blocked_by(*behind) == [head.pk] * 3
    return head, behind


def test_a_head_that_becomes_due_takes_those_behind_it_along(cursor: Cursor) -> None:
    """Parked or not: a claim of the head continues from row to row."""
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


def test_of_several_that_end_in_a_line_the_first_frees_the_next(cursor: Cursor) -> None:
    head, second, third, fourth = keyed(), keyed(), keyed(), keyed()
    for each in second, fourth:
        QueuedMessage.objects.filter(pk=each.pk).update(blocked_by=head.pk)
    QueuedMessage.objects.filter(pk__in=pks(head, third)).delete()
    lines = [KeyLine("mail", "h", "k", each) for each in (third.pk, head.pk)]
    keys.free_next(cursor, lines)
    assert blocked_by(second, fourth) == [None, head.pk]


def test_free_next_without_followers(cursor: Cursor) -> None:
    keys.free_next(cursor, [])
    keys.free_next(cursor, [KeyLine("mail", "h", "k")])
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
    assert len(pruning.prune_dead(cursor, queue="mail", older_than=5, limit=10).messages) == 1
    assert keys.free_stranded(cursor, skipping=[], limit=10).rows == 1


def deleted(cursor: Cursor, head: QueuedMessage) -> None:
    QueuedMessage.objects.filter(pk=head.pk).delete()
    assert keys.free_stranded(cursor, skipping=[], limit=10).rows == 1


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
    """Whichever message is cancelled in the middle of a line, the others keep waiting."""
    head, behind = park(cursor)
    assert acting.cancel(behind[0].pk)
    assert blocked_by(*behind[1:]) == [head.pk] * 2
    assert take(cursor).rows == []


def test_an_expired_head_blocks_as_a_dead_one_does(cursor: Cursor) -> None:
    head, behind = park(cursor, after=60, expires=-1)
    with cursor.connection.transaction():
        assert [row.id for row in expiry.expire(cursor, limit=10)] == [head.pk]
        keys.free_next(cursor, [KeyLine("mail", "h", "k")])
    assert take(cursor).rows == []
    assert blocked_by(*behind) == [head.pk] * 3
    assert ids(take(cursor, skip_dead=True)) == []  # they were parked again: now a chore frees them
    assert keys.free_stranded(cursor, skipping=["mail"], limit=10).rows == 1
    assert ids(take(cursor, skip_dead=True)) == pks(*behind)


# ---- a dead head may be skipped


def test_dead_head_is_passed_with_skip_dead(cursor: Cursor) -> None:
    dead = keyed(dead=-1)
    first, dead_too, last = keyed(), keyed(dead=-1), keyed()
    claimed = take(cursor, skip_dead=True)
    assert ids(claimed) == pks(first, last)
    assert blocked_by(dead, dead_too) == [None, None]


def test_one_that_dies_is_passed(cursor: Cursor) -> None:
    messages = [keyed(max_attempts=1), keyed(), keyed()]
    claimed = take(cursor, limit=1, skip_dead=True)
    with cursor.connection.transaction():
        settle.dead_letter_unstarted(cursor, {fences(claimed)[0]: "exhausted"})
        keys.free_next(cursor, [KeyLine("mail", "h", "k")])
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


# ---- leftovers of a race


def test_follower_of_a_missing_head_is_freed(cursor: Cursor) -> None:
    """Once per line; messages parked behind an existing one stay."""
    lost = [keyed("a", blocked_by=2**40), keyed("a", blocked_by=2**40)]
    lost += [keyed("b", blocked_by=2**41)]
    _, behind = park(cursor)
    assert keys.free_stranded(cursor, skipping=[], limit=10).rows == 2
    assert blocked_by(*lost) == [None, 2**40, None]
    assert blocked_by(*behind) != [None] * 3
    claimed = take(cursor)
    assert ids(claimed) == pks(lost[0], lost[2], lost[1])
    ack(cursor, claimed)
    assert keys.free_stranded(cursor, skipping=[], limit=10).rows == 0


def test_message_blocked_by_itself_or_another_line_is_freed(cursor: Cursor) -> None:
    """Other programs wrote these: nothing would ever free them, or the messages behind them."""
    itself = keyed("a")
    stays = keyed("b", after=60)
    elsewhere = [keyed("c", blocked_by=stays.pk), keyed("d", queue="post", blocked_by=itself.pk)]
    without_key = add(handler="h", blocked_by=2**40)
    behind = keyed("b", blocked_by=stays.pk)
    QueuedMessage.objects.filter(pk=itself.pk).update(blocked_by=itself.pk)
    for _ in range(5):
        keys.free_stranded(cursor, skipping=[], limit=10)
    assert blocked_by(itself, without_key, behind) == [None, None, stays.pk]
    assert None in blocked_by(*elsewhere)


def test_many_that_wait_for_several_are_freed_in_pieces(cursor: Cursor) -> None:
    for n in range(5):
        keyed(f"k{n}", blocked_by=2**40 + n)
    assert keys.free_stranded(cursor, skipping=[], limit=3).rows == 3
    assert keys.free_stranded(cursor, skipping=[], limit=3).rows == 2


@pytest.mark.parametrize("line", [{"handler": "h"}, {"key": "other"}])
def test_follower_of_a_head_that_changed_lines_is_freed(
    cursor: Cursor, line: dict[str, str]
) -> None:
    """An unrouted head got its handler: its line is now that handler's."""
    head = keyed(handler="", after=60)
    behind = keyed(handler="")
    assert take(cursor).rows == []
    assert blocked_by(behind) == [head.pk]
    QueuedMessage.objects.filter(pk=head.pk).update(**line)
    assert keys.free_stranded(cursor, skipping=[], limit=10).rows == 1
    assert ids(take(cursor)) == [behind.pk]


def test_parking_skips_a_head_that_is_being_acked(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """A claim parks behind a head while that is being acked: the head is skipped, and not lost."""
    head = keyed(after=60)
    behind = keyed()
    other.execute("delete from django_mq_queuedmessage where id = %s", [head.pk])
    cursor.execute("set statement_timeout = '60s'")
    assert take(cursor).rows == []
    assert blocked_by(behind) == [None]
    other.commit()
    assert ids(take(cursor)) == [behind.pk]


# ---- lapsed


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True, "key": None}])
def test_of_a_line_that_lapsed_the_first_is_charged_and_the_others_go_back(
    cursor: Cursor, line: dict[str, Any]
) -> None:
    """Guarantee 3: only the first can have run, whichever lapsed first, or is locked."""
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


@pytest.mark.parametrize("line", [{"key": "k"}, {"ordered": True, "key": None}])
def test_the_others_go_back_with_the_first_however_few_may_be_taken(
    cursor: Cursor, line: dict[str, Any]
) -> None:
    """Later, when the first has ended, nobody could tell that they had not run."""
    messages = [keyed(leased=-1, attempts=1, **line) for _ in range(3)]
    other = keyed(leased=-0.5, attempts=1, **{**line, "handler": "other", "queue": "other"})
    found = take_lapsed(cursor, "mail", "other", limit=1, window=10)
    assert ([row.id for row in found.taken], found.released) == ([messages[0].pk], 2)
    assert [stored(m).attempts for m in messages] == [2, 0, 0]
    assert (stored(other).attempts, stored(other).claimed_by) == (1, "worker:1")
    found = take_lapsed(cursor, "mail", "other", limit=1, window=10, marks=found.marks)
    assert [row.id for row in found.taken] == [other.pk]


def test_a_later_one_that_lapsed_goes_back_while_the_first_is_in_flight(cursor: Cursor) -> None:
    """Or locked: the session that has it still runs it."""
    first, second = keyed(leased=30, attempts=1), keyed(leased=-1, attempts=1)
    found = lapsed.claim_lapsed(
        cursor, queues=["mail"], claimer="me:8", lease=30.0, limit=10, max_bytes=1000
    )
    assert (found.taken, found.dead) == ([], [])
    assert [stored(m).attempts for m in (first, second)] == [1, 0]
    assert FailedAttempt.objects.count() == 0
