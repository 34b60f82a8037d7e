"""Taking over lapsed messages costs the same with any backlog and with a held snapshot.

Pages are counted, which are the same on a busy machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
import pytest

from django_mq.store.claim_lapsed import CLAIM_LAPSED, Mark, claim_lapsed
from tests.database import second_connection
from tests.store.plans import pages

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]

QUEUES = ["keys", "plain", "priorities"]
LIMIT, CLAIMS = 50, 30
ENOUGH = LIMIT * CLAIMS * 2

FILL = """
insert into django_mq_queuedmessage
       (queue, handler, type, key, priority, payload, processable_after, attempts, claimed_by,
        leased_until)
select queue, 'h', 't', case queue when 'keys' then 'k' || n end,
       case queue when 'priorities' then n %% 5 else 0 end, '{}', now() - interval '1 hour', 1,
       'gone:1', now() - interval '1 hour' + n * interval '1 ms'
  from unnest(%(queues)s::text[]) queue, generate_series(%(first)s::int, %(last)s::int) n
"""


def fill(cursor: Cursor, first: int, last: int) -> None:
    cursor.execute(FILL, {"queues": QUEUES, "first": first, "last": last})
    cursor.execute("vacuum analyze django_mq_queuedmessage")


def touched(queue: str, marks: Mapping[str, Mark]) -> int:
    at, id = marks.get(queue, (float("-inf"), 0))
    return pages(
        CLAIM_LAPSED,
        {
            "queues": [queue],
            "ats": [at],
            "ids": [id],
            "claimer": "me:1",
            "lease": 30.0,
            "limit": LIMIT,
            "window": LIMIT,
            "bytes": 4 << 20,
            "skip_dead": False,
            "admitted": False,
            "suspects": True,
            "nonatomic": "{}",
        },
    )


@pytest.mark.slow
def test_a_larger_backlog_costs_no_more(cursor: Cursor) -> None:
    fill(cursor, 1, 1000)
    few = {queue: touched(queue, {}) for queue in QUEUES}
    fill(cursor, 1001, 20_000)
    many = {queue: touched(queue, {}) for queue in QUEUES}
    assert {queue: n for queue, n in many.items() if n > 2 * few[queue] + LIMIT} == {}


def test_a_held_snapshot_costs_no_more(cursor: Cursor) -> None:
    """Rows already taken stay in the index, behind the mark."""
    fill(cursor, 1, ENOUGH)
    before = {queue: touched(queue, {}) for queue in QUEUES}
    with second_connection() as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with holder.transaction():
            holder.execute("select 1 from django_mq_queuedmessage limit 1")
            marks: dict[str, Mark] = {}
            for _ in range(CLAIMS):
                for queue in QUEUES:
                    found = claim_lapsed(
                        cursor,
                        queues=[queue],
                        claimer="me:1",
                        lease=30.0,
                        limit=LIMIT,
                        max_bytes=4 << 20,
                        marks=marks,
                    )
                    assert len(found.taken) == LIMIT
                    marks.update(found.marks)
                    cursor.execute(
                        "delete from django_mq_queuedmessage where id = any(%s)",
                        [[row.id for row in found.taken]],
                    )
            after = {queue: touched(queue, marks) for queue in QUEUES}
            full = touched("plain", {})
    assert {queue: n for queue, n in after.items() if n > before[queue] + LIMIT} == {}
    assert full > after["plain"]  # there were rows to pass, on pages that may be few
