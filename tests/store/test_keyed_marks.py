"""Keyed claims resume behind a mark, so a held snapshot does not make them slower.

Pages are counted, which are the same on a busy machine.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from django_mq.store.claim import Lane, lane_columns
from django_mq.store.claim_lines import CLAIM_LINES
from django_mq.store.key_lines import LOCK_LINES
from django_mq.store.keys import FREE_NEXT
from tests.database import held_snapshot
from tests.rows import add, pks
from tests.store.conftest import lock
from tests.store.keyed import Cursor, ack, ids, keyed, take
from tests.store.plans import pages

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT, CLAIMS = 50, 40

FILL = """
insert into django_mq_queuedmessage (queue, type, handler, key, payload, processable_after)
select 'mail', 'a', 'h', 'k' || n, to_jsonb(repeat(md5(n::text), 30)),
       now() - interval '1 h' + n * interval '1 ms'
  from generate_series(1, 4000) n
"""


def lane(marks: dict[tuple[str, int], tuple[float, int]]) -> Lane:
    return Lane("mail", 0, *marks["mail", 0])


def touched(lane: Lane) -> int:
    """The number of pages that a claim's first statement touches: both scan the lane alike."""
    return pages(
        LOCK_LINES,
        {
            "queues": [lane.queue],
            "priorities": [lane.priority],
            "ats": [lane.at],
            "ids": [lane.id],
            "limit": LIMIT,
            "window": LIMIT,
            "skip_dead": False,
            "admitted": False,
        },
    )


def test_a_held_snapshot_costs_keyed_claims_no_more(cursor: Cursor) -> None:
    """If each message has its own key; dead versions of a single key are walked over anyway."""
    cursor.execute(FILL)
    cursor.execute("vacuum analyze django_mq_queuedmessage")
    mark = Lane("mail", 0)
    before = touched(mark)
    with held_snapshot():
        for _ in range(CLAIMS):
            claimed = take(cursor, mark, limit=LIMIT)
            assert len(claimed.rows) == LIMIT
            cursor.execute("delete from django_mq_queuedmessage where id = any(%s)", [ids(claimed)])
            mark = lane(claimed.marks)
        cursor.execute("vacuum analyze django_mq_queuedmessage")
        after, full = touched(mark), touched(Lane("mail", 0))
    assert after <= 1.5 * before + LIMIT  # the index of lines in flight has one more level
    assert full > 1.5 * after  # there were rows to pass


FEW_KEYS = """
insert into django_mq_queuedmessage (queue, type, handler, key, payload, processable_after)
select 'mail', 'a', 'h', 'k', '{}', now() - interval '1 h' + n * interval '1 ms'
  from generate_series(1, 2000) n
"""


def test_a_held_snapshot_costs_a_busy_key_few_walks(cursor: Cursor) -> None:
    """A claim walks over the dead rows of its key once, and an ack not at all."""
    cursor.execute(FEW_KEYS)
    with held_snapshot():
        gone = 0
        while gone < 1500:
            claimed = take(cursor, limit=100)
            ack(cursor, claimed)
            gone += len(claimed.rows)
        line = ("{mail}", "{h}", "{k}")
        names = ("line_queues", "line_handlers", "line_keys")
        claiming = {"window": LIMIT, "limit": LIMIT, "skip_dead": False, "admitted": False}
        claiming |= lane_columns([Lane("mail", 0)])
        lock = pages(LOCK_LINES, claiming)
        claiming |= dict(zip(names, line, strict=True)) | {
            "line_starts": "{1}",
            "line_limits": "{1000}",
            "with_marks": False,
            "park": True,
            "nonatomic": "{}",
        }
        claiming |= {"claimers": "{me:1}", "per_claimer": LIMIT, "lease": 30.0, "bytes": 1 << 20}
        claim = pages(CLAIM_LINES, claiming)
        names = ("queues", "handlers", "keys")
        freeing = dict(zip(names, line, strict=True)) | {"afters": [claimed.rows[-1].id]}
        free = pages(FREE_NEXT, freeing)
    assert lock + claim <= 5 * gone  # 9 with the lookups of heads that it does not need
    assert free <= 20


def test_mark_passes_only_taken_and_parked_rows(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    first = keyed("a", after=-90)
    keyed("later", after=3600)
    parked = keyed("later", after=-80)
    locked = keyed("b", after=-70)
    last = keyed("c", after=-60)
    lock(other, locked.pk)
    claimed = take(cursor)
    assert ids(claimed) == pks(first, last)
    assert claimed.marks["mail", 0][1] == parked.pk
    other.rollback()
    assert ids(take(cursor, lane(claimed.marks))) == [locked.pk]


def test_a_mark_does_not_pass_a_line_in_flight(cursor: Cursor) -> None:
    """The next message of the line is due as soon as the one before it ends."""
    head, behind = keyed("a", after=-90), keyed("a", after=-80)
    in_flight = take(cursor, limit=1)
    assert ids(in_flight) == [head.pk]
    other = keyed("b", after=-70)
    claimed = take(cursor)
    assert (ids(claimed), claimed.marks) == ([other.pk], {})
    ack(cursor, in_flight)
    assert ids(take(cursor)) == [behind.pk]


def test_each_lane_has_its_mark(cursor: Cursor) -> None:
    high, low = keyed("a", priority=5), add(priority=0)
    claimed = take(cursor, Lane("mail", 5), Lane("mail", 0))
    assert {name: id for name, (_, id) in claimed.marks.items()} == {
        ("mail", 5): high.pk,
        ("mail", 0): low.pk,
    }
    assert take(cursor, *(Lane(*n, *m) for n, m in claimed.marks.items())).rows == []
