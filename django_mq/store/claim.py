"""Claim: take due messages for a lease.

The shape of each statement was found by experiment:

- MATERIALIZED keeps every plan from taking more rows than asked for;
- LATERAL over lanes ends the scan at the first full batch;
- the UPDATE joins by id, never by ctid: the statement cannot see the new ctid of a row that
  changed between its snapshot and its lock;
- the join uses ANY: with =, the planner may start the join with a scan of the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.store import array, names
from django_mq.store.claimed_row import COLUMN_COUNT, NEXT_ATTEMPT, claimed_columns, unstarted_claim
from django_mq.store.gates import is_open

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: The mark before every row: a lane with this mark is scanned from its beginning.
LANE_START = (float("-inf"), 0)


class Lane(NamedTuple):
    """The waiting messages of one queue with one priority, from a mark on.

    `at` and `id` are the `processable_after`, in seconds since 1970, and the id of the last row
    taken. A float keeps microseconds exact until 2106.
    """

    queue: str
    priority: int
    at: float = LANE_START[0]
    id: int = LANE_START[1]


class Claim(NamedTuple):
    """The claimed rows, in order, and a mark per lane: the last row taken from it.

    `unfinished`: the claim parked waiting rows and did not look at the rows behind them. `stuck`:
    it took nothing and left waiting rows unparked, so it did not look at the rows behind those.
    `left_lines`: it took nothing from some lines, because their limit was 0.
    """

    rows: list[ClaimedRow]
    marks: dict[tuple[str, int], tuple[float, int]]
    unfinished: bool = False
    stuck: bool = False
    left_lines: bool = False


NOTHING = Claim([], {})

#: Marks the places in the statements of claims where `excluding()` adds a condition.
EXCLUDED = "/* excluded */"


def excluding(statement: str, ids: Sequence[int]) -> str:
    """Return the claim `statement`, which also leaves out the rows in its parameter `excluded`.

    Without `ids` the statement stays unchanged, and costs nothing more.
    """
    return (
        statement.replace(EXCLUDED, "and m.id <> all(%(excluded)s::bigint[])") if ids else statement
    )


#: The lanes of `lane_columns()`, in order, without the lanes of closed queues.
OPEN_LANES = f"""
            select lane.queue, lane.priority, to_timestamp(lane.at) as at, lane.id
              from unnest(%(queues)s::text[], %(priorities)s::smallint[],
                          %(ats)s::float8[], %(ids)s::bigint[])
                   with ordinality as lane (queue, priority, at, id, ordinal)
             where {is_open("lane.queue")}
             order by lane.ordinal
"""

CLAIM = f"""
with taken as materialized (
    select id, at, n, payload,
           (%(claimers)s::text[])[(n - 1) / %(per_claimer)s + 1] as claimer
      from (
        select d.*, row_number() over so_far as n,
               sum(octet_length(d.payload)) over so_far as bytes
          from (
            select d.*
              from ({OPEN_LANES}) lane
             cross join lateral (
                select m.id, m.processable_after as at, m.payload::text as payload
                  from django_mq_queuedmessage m
                 where m.queue = lane.queue and m.priority = lane.priority and m.key is null
                   and m.leased_until is null and m.blocked_by is null and m.dead_at is null
                   and (m.processable_after, m.id) > (lane.at, lane.id)
                   and m.processable_after <= statement_timestamp() {EXCLUDED}
                 order by m.processable_after, m.id
                 limit %(limit)s
                   for no key update of m skip locked
             ) d
             limit %(limit)s
          ) d
        window so_far as (rows unbounded preceding)
      ) due
     where n = 1 or bytes <= %(bytes)s
)
update django_mq_queuedmessage m
   set attempts = {NEXT_ATTEMPT}, claimed_by = taken.claimer,
       unstarted_claim = {unstarted_claim("taken.claimer")},
       leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
  from taken
 where m.id = any(array[taken.id])
returning {claimed_columns(payload="taken.payload")},
          date_part('epoch', taken.at), taken.n
"""


def claim(
    cursor: Cursor,
    *,
    lanes: Sequence[Lane],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    admitted: bool = False,
    more_claimers: Sequence[str] = (),
    excluded: Sequence[int] = (),
    nonatomic: Sequence[str] = (),
) -> Claim:
    """Take up to `limit` due messages without a key from `lanes`, in order, for `lease` seconds.

    Their payloads total at most `max_bytes` of JSON text, except that one message is always taken.
    Within a lane the order is due time, then id. Locked rows are skipped. `admitted`: the caller
    holds the gate of the queue.

    The `more_claimers` share the taken rows: one statement makes several claims, since a
    transaction costs the same for a few hundred messages as for one. Rows whose ids are in
    `excluded` are left out. `nonatomic` are the names of handlers that run only after
    `leases.start()`: their rows record that they have not started (`unstarted_claim`).
    """
    claimers = (claimer, *more_claimers)
    cursor.execute(
        excluding(CLAIM, excluded),
        {
            **lane_columns(lanes),
            "excluded": array(excluded),
            "claimers": array(claimers),
            "per_claimer": -(-limit // len(claimers)),
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
            "admitted": admitted,
            "nonatomic": names(nonatomic),
        },
    )
    found = cursor.fetchall()
    found.sort(key=_number)  # RETURNING promises no order
    marks = {(row[1], row[7]): (row[COLUMN_COUNT], row[0]) for row in found}
    return Claim([ClaimedRow._make(row[:COLUMN_COUNT]) for row in found], marks)


def lane_columns(lanes: Sequence[Lane]) -> dict[str, object]:
    """Return lanes as parameters: parallel array literals (see `fence_columns()`)."""
    return {
        "queues": names(lane.queue for lane in lanes),
        "priorities": array(lane.priority for lane in lanes),
        "ats": array(lane.at for lane in lanes),
        "ids": array(lane.id for lane in lanes),
    }


_number = itemgetter(COLUMN_COUNT + 1)
