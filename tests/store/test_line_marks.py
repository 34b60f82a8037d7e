"""Claims of a line begin at a mark, where no message can be missed and none overtaken."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import time
from typing import Any

import psycopg
import pytest
from django.db.models.functions import Now

from django_mq.models import QueuedMessage
from django_mq.policy import line_marks
from django_mq.policy.line_marks import FRONT, LineMarks, Snapshot
from django_mq.store import ordered_queues
from django_mq.store.claim import excluding
from django_mq.store.ordered_queues import CLAIM_LINE, ClaimedLine
from tests.database import held_snapshot, second_connection
from tests.rows import add, insert_all
from tests.store.ordered import Cursor, claim, own, row
from tests.store.plans import pages
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

INSERT = """
insert into django_mq_queuedmessage (queue, type, payload, ordered)
values ('line', 'a', '{}', true) returning id
"""


class Line:
    """Claims that begin at the mark, each of one message, which is acked at once."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.marks = FRONT

    def claim(self, limit: int = 1) -> ClaimedLine:
        claimed = claim(self.cursor, limit=limit, marks=self.marks, from_front=False)
        self.marks = claimed.marks
        return claimed

    def next(self, limit: int = 1) -> list[int]:
        ids = [each.id for each in self.claim(limit).rows]
        QueuedMessage.objects.filter(pk__in=ids).delete()
        return ids


@pytest.fixture
def line(cursor: Cursor, monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(line_marks, "INSERT_SECONDS", 0.0)
    assert own(cursor, lease=600.0)
    return Line(cursor)


def moved(line: Line, *, beyond: int = 0) -> LineMarks:
    """Claim until the mark has moved: transactions of other databases hold it up, too."""

    def moves() -> bool:
        row()
        assert line.next()
        return line.marks.first > beyond

    until(moves, "the mark moves")
    return line.marks


def test_the_mark_follows_the_head(line: Line) -> None:
    ids = [row().pk for _ in range(5)]
    assert [line.next() for _ in ids] == [[id] for id in ids]
    assert moved(line, beyond=ids[-1]).first < row().pk


def test_a_lower_id_that_commits_late_is_claimed_first(line: Line) -> None:
    """It was committed before a message that waits behind it: somebody may have seen it."""
    before = moved(line)
    with second_connection() as other:
        with other.transaction():
            late = other.execute(INSERT).fetchone()
            for _ in range(6):
                row()
                assert line.next()
            assert line.marks.first <= before.head
        next = row()
        assert late == tuple(line.next())
        assert line.next() == [next.pk]
    moved(line, beyond=next.pk)


def test_a_transaction_that_began_after_the_snapshot_was_read_counts(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim itself sees more: the message that it claims may have the higher id of two."""
    moved(line)
    with second_connection() as other:
        late = []

        def meanwhile(statement: str, ids: Sequence[int]) -> str:
            if not late:
                other.execute("begin")
                late.extend(other.execute(INSERT).fetchone() or ())
                row()
            return excluding(statement, ids)

        monkeypatch.setattr(ordered_queues, "excluding", meanwhile)
        assert line.next() > late
        for _ in range(5):
            row()
            assert line.next() > late
        other.execute("commit")
        assert line.next() == late


def test_an_insert_that_has_its_id_but_no_transaction_id_yet_has_a_second(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_marks, "INSERT_SECONDS", 600.0)
    for _ in range(5):
        row()
        assert line.next()
    assert line.marks.first == 0


def test_transactions_are_compared_with_a_snapshot_from_after_that_second() -> None:
    """An insert drew an id below 7 at 100.0 and got transaction id 60 at 100.5; it stays open."""
    marks = FRONT.claimed(7, Snapshot(at=100.0, xmin=50, own=52))
    marks = marks.claimed(8, Snapshot(at=100.1, xmin=53, own=55))
    for at in (101.2, 102.4, 109.0):
        marks = marks.claimed(9, Snapshot(at=at, xmin=60, own=70))
    assert marks.first == 0
    assert marks.claimed(9, Snapshot(at=110.0, xmin=71, own=80)).first == 7


def test_a_transaction_that_got_its_id_after_the_claim_counts(line: Line) -> None:
    """It is the last one to get an id, and the first one to draw from the sequence."""
    with second_connection() as other, other.transaction():
        late = drawn_without_transaction_id(other)
        ids = [row().pk for _ in range(6)]
        assert line.next() == ids[:1]
        other.execute(
            "insert into django_mq_queuedmessage (id, queue, type, payload, ordered)"
            " values (%s, 'line', 'a', '{}', true)",
            [late],
        )
        assert [line.next() for _ in ids[1:]] == [[id] for id in ids[1:]]
        assert line.marks.first <= late


def drawn_without_transaction_id(other: psycopg.Connection[Any]) -> int:
    """Draw an id as an INSERT does just before its transaction is assigned one of its own."""
    while True:
        (id,) = other.execute(
            "select nextval(pg_get_serial_sequence('django_mq_queuedmessage', 'id'))"
        ).fetchone() or (0,)
        (assigned,) = other.execute("select pg_current_xact_id_if_assigned()").fetchone() or (0,)
        if assigned is None:
            return id
        other.execute("rollback; begin")  # each 32nd id writes to the log


@pytest.mark.parametrize("retried", [True, False])
def test_message_back_before_the_mark_blocks_the_line_again(line: Line, retried: bool) -> None:
    """An operator requeued some, whose first claim began at the front."""
    ids = [row().pk for _ in range(2)]
    QueuedMessage.objects.all().delete()
    moved(line, beyond=ids[-1])
    for id in ids:
        row(id=id)
    behind = row().pk
    found = claim(line.cursor, limit=1, marks=line.marks)
    assert [each.id for each in found.rows] == ids[:1]
    line.marks = found.marks
    if retried:
        QueuedMessage.objects.filter(pk=ids[0]).update(
            leased_until=None, claimed_by=None, processable_after=Now() + timedelta(hours=1)
        )
        assert line.next() == []
    QueuedMessage.objects.filter(pk=ids[0]).delete()
    assert [line.next(), line.next()] == [ids[1:], [behind]]


def test_after_the_servers_clock_was_set_back_the_line_begins_at_the_front(line: Line) -> None:
    """Leases end before the mark now."""
    id = row().pk
    QueuedMessage.objects.all().delete()
    moved(line, beyond=id)
    line.marks = line.marks._replace(lease=time() + 3600)
    flying = row(id=id, leased=30, attempts=1)
    waiting = row()
    assert line.next() == []
    flying.delete()
    assert line.next() == [waiting.pk]
    assert line.marks.lease < time() + 1800


def test_message_in_flight_stops_the_line_despite_a_short_lease(line: Line) -> None:
    moved(line)
    flying = add("line", ordered=True, leased=0, attempts=1)
    waiting = row()
    assert line.next() == []
    flying.delete()
    assert line.next() == [waiting.pk]


def test_another_claim_in_flight_stops_the_line(line: Line) -> None:
    moved(line)
    row(), row()
    assert line.claim().rows
    assert not line.claim().rows


def test_a_head_that_waits_keeps_its_place(line: Line) -> None:
    """The mark never passes a message that is retried."""
    moved(line)
    head, behind = row(), row()
    for _ in range(3):
        claimed = line.claim()
        assert [each.id for each in claimed.rows] == [head.pk]
        QueuedMessage.objects.filter(pk=head.pk).update(leased_until=None, claimed_by=None)
    QueuedMessage.objects.filter(pk=head.pk).delete()
    assert line.next() == [behind.pk]


def test_a_held_snapshot_makes_claims_of_a_line_no_slower(line: Line) -> None:
    """Pages are counted, which are the same on a busy machine."""
    params = {
        "queue": "line",
        "claimers": "{me:1}",
        "per_claimer": 50,
        "lease": 6.0,
        "limit": 50,
        "bytes": 1 << 20,
        "skip_dead": False,
        "admitted": False,
        "nonatomic": "{}",
    }
    last = insert_all({"queue": "line", "ordered": True} for _ in range(2000))[-1]
    with held_snapshot():
        for _ in range(40):
            assert len(line.next(50)) == 50
        moved(line, beyond=last)
        line.cursor.execute("analyze django_mq_queuedmessage")
        from_mark, from_front = (
            pages(CLAIM_LINE, {**params, "first": each.first, "lease_mark": each.lease})
            for each in (line.marks, FRONT)
        )
    assert 2 * from_mark < from_front
