"""Claim: take due messages for a lease.

The shape of each statement was found by experiment: MATERIALIZED, so that no plan takes more
rows than asked for; LATERAL over lanes, so that the walk stops at the first full batch; the
UPDATE joins by id and never by ctid, since a row that changed between snapshot and lock has a
ctid which the statement cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.store import gates
from django_mq.store.claimed import claimed_columns

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: Before every row: a lane with this mark is scanned from its beginning.
BEGINNING = (datetime(1, 1, 1, tzinfo=UTC), 0)


class Lane(NamedTuple):
    """The waiting messages of one queue with one priority, from a mark on.

    `at` and `id` are `processable_after` and id of the last row that was taken.
    """

    queue: str
    priority: int
    at: datetime = BEGINNING[0]
    id: int = BEGINNING[1]


class Claim(NamedTuple):
    """What a claim took, in order, and for each lane it took from, the last row of its scan.

    `further`: it moved waiting rows out of the way, and did not look at what is behind them.
    """

    rows: list[ClaimedRow]
    marks: dict[tuple[str, int], tuple[datetime, int]]
    further: bool = False


NOTHING = Claim([], {})

#: What `lane_columns()` gives, without the lanes of closed queues, in order.
OPEN_LANES = f"""
            select lane.*
              from unnest(%(queues)s::text[], %(priorities)s::smallint[],
                          %(ats)s::timestamptz[], %(ids)s::bigint[])
                   with ordinality as lane (queue, priority, at, id, place)
             where {gates.is_open("lane.queue")}
             order by lane.place
"""  # noqa: S608  (made of our own texts, as is the next)

CLAIM = f"""
with due as materialized (
    select d.*, row_number() over () as n
      from (
        select d.*
          from ({OPEN_LANES}) lane
         cross join lateral (
            select m.id, m.processable_after as at, m.payload::text as payload
              from django_mq_queuedmessage m
             where m.queue = lane.queue and m.priority = lane.priority
               and m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and (m.processable_after, m.id) > (lane.at, lane.id)
               and m.processable_after <= statement_timestamp()
               and m.key is null
             order by m.processable_after, m.id
             limit %(limit)s
               for no key update of m skip locked
         ) d
         limit %(limit)s
      ) d
), taken as materialized (
    select id, at, n, payload
      from (
        select due.*, sum(octet_length(payload)) over (order by n) as total
          from due
      ) due
     where n = 1 or total <= %(bytes)s
)
update django_mq_queuedmessage m
   set attempts = m.attempts + 1, claimed_by = %(claimer)s,
       leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
  from taken
 where m.id = taken.id
returning {claimed_columns(payload="taken.payload")},
          taken.at, taken.n
"""  # noqa: S608


def claim(
    cursor: Cursor,
    *,
    lanes: Sequence[Lane],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    admitted: bool = False,
) -> Claim:
    """Take up to `limit` due messages without a key of `lanes`, in order, for `lease` seconds.

    Their payloads together have at most `max_bytes` of JSON text; one message is taken
    whatever its size. Within a lane: by due time, then id. What others have locked is skipped.
    `admitted`: the caller holds the gate of the queue.
    """
    cursor.execute(
        CLAIM,
        {
            **lane_columns(lanes),
            "claimer": claimer,
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
            "admitted": admitted,
        },
    )
    found = cursor.fetchall()
    found.sort(key=_place)  # RETURNING promises no order
    marks = {(row[1], row[7]): (row[21], row[0]) for row in found}
    return Claim([ClaimedRow._make(row[:21]) for row in found], marks)


def lane_columns(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return lanes as parameters: parallel arrays."""
    return {
        "queues": [lane.queue for lane in lanes],
        "priorities": [lane.priority for lane in lanes],
        "ats": [lane.at for lane in lanes],
        "ids": [lane.id for lane in lanes],
    }


def _place(row: Sequence[int]) -> int:
    return row[22]
