"""Claim from queues with order keys: take what is first of its key, park what waits behind.

The line of a key is (queue, handler, key); its head is the row with the lowest id. A row is taken
only together with every earlier one of its line, and only while no row of the line carries a
claim, so at most one worker has a line. Claims of one line exclude each other by an advisory
lock, taken in a statement of its own: the snapshot of the claim follows the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_mq.messages import ClaimedRow
from django_mq.store.claim import OPEN_LANES, Claim, Lane, lane_columns
from django_mq.store.claimed import NEXT_ATTEMPT, WIDTH, claimed_columns

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: So many waiting rows one claim looks at, or as many as it may take. When as many are met, those
#: that cannot be taken are parked out of the way: no claim walks over a long line twice.
WINDOW = 250

_WINDOW = f"""
    select window_.*, row_number() over () as n
      from (
        select row_.*
          from ({OPEN_LANES}) lane
         cross join lateral (
            select m.id, m.queue, m.handler, m.key
              from django_mq_queuedmessage m
             where m.queue = lane.queue and m.priority = lane.priority
               and m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and (m.processable_after, m.id) > (lane.at, lane.id)
               and m.processable_after <= statement_timestamp()
             order by m.processable_after, m.id
             limit %(window)s
         ) row_
         limit %(window)s
      ) window_
"""  # noqa: S608  (made of our own texts, as are those below)

# The head of a line; with skip_dead a dead one does not count. Asked with = the planner may walk
# the primary key instead, over whatever was settled since the last vacuum: 10 ms, not 0.01. So it
# may where it is asked for ids alone.
_HEAD = """
            select m.id, m.dead_at, m.leased_until, m.processable_after as at
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler
               and m.key >= line.key and m.key <= line.key
               and (m.dead_at is null or not %(skip_dead)s)
             order by m.key, m.id
             limit 1
"""

_CAN_BE_TAKEN = """
            head.dead_at is null and head.leased_until is null
       and head.at <= statement_timestamp()
       and (select m.id
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler and m.key = line.key
               and m.leased_until is not null
             limit 1) is null
"""

# A row that is to be parked, locked if it still waits. Asked as mq_claim asks, the planner may walk
# that index for its id.
_WAITING = """lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = behind.id
           and num_nonnulls(m.leased_until, m.blocked_by, m.dead_at) = 0
           for no key update skip locked
     ) waiting"""

# OFFSET 0 keeps the locks from being tried before it is known which lines can be taken; of those
# the limit counts only what nobody else is claiming from.
LOCK_LINES = f"""
with seen as materialized ({_WINDOW}), line as (
    select queue, handler, key, min(n) as n
      from seen
     where key is not null
     group by queue, handler, key
     order by min(n)
)
select line.queue, line.handler, line.key, line.n
  from (
    select line.*
      from line
     cross join lateral ({_HEAD}) head
     where {_CAN_BE_TAKEN}
    offset 0
  ) line
 where pg_try_advisory_xact_lock(
           hashtextextended(line.queue || ' ' || line.handler || ' ' || line.key, 1))
 limit %(limit)s
"""  # noqa: S608

CLAIM_LINES = f"""
with seen as materialized ({_WINDOW}), line as materialized (
    select line.*
      from unnest(%(line_queues)s::text[], %(line_handlers)s::text[], %(line_keys)s::text[],
                  %(line_places)s::bigint[]) as line (queue, handler, key, n)
), head as materialized (
    select line.*, head.id
      from line
     cross join lateral ({_HEAD}) head
     where {_CAN_BE_TAKEN}
), room as materialized (
    select greatest(
        (%(limit)s - (select count(*) from seen where key is null) - 1)
            / greatest((select count(*) from head), 1) + 1,
        1) as each
), run as (
    select run.id, head.n, run.place
      from head
     cross join lateral (
        select row_.id, row_number() over (order by row_.id) as place,
               bool_and(row_.ok) over (order by row_.id) as unbroken
          from (
            select m.id,
                   m.dead_at is null and m.leased_until is null
                   and m.processable_after <= statement_timestamp() as ok
              from django_mq_queuedmessage m
             where m.queue = head.queue and m.handler = head.handler
               and (m.key, m.id) >= (head.key, head.id) and m.key <= head.key
               and (m.dead_at is null or not %(skip_dead)s)
             order by m.key, m.id
             limit (select each from room)
          ) row_
     ) run
     where run.unbroken
), chosen as materialized (
    select run.id, run.n, run.place, true as lined from run
    union all
    select seen.id, seen.n, 1, false from seen where seen.key is null
), locked as materialized (
    select m.id, m.payload::text as payload, chosen.n, chosen.place, chosen.lined
      from (select * from chosen order by place, n) chosen
     cross join lateral (
        select m.id, m.payload
          from django_mq_queuedmessage m
         where m.id = chosen.id and m.dead_at is null and m.leased_until is null
           and m.processable_after <= statement_timestamp()
           for no key update skip locked
     ) m
     limit %(limit)s
), taken as materialized (
    select id, payload, turn
      from (
        select locked.*, row_number() over turns as turn,
               sum(octet_length(payload)) over turns as total
          from (
            select locked.*, row_number() over (partition by lined, n order by place) as nth
              from locked
          ) locked
         where nth = place
        window turns as (order by place, n)
      ) locked
     where turn = 1 or total <= %(bytes)s
), grouped as (
    select seen.*,
           case when row_number() over (partition by queue, handler, key order by n) = 1
                then seen.key end as asks
      from seen
     where seen.key is not null
), spread as (
    select id, max(head) over line as head, bool_or(waits) over line as waits
      from (
        select grouped.*, head.id as head,
               head.dead_at is not null or head.at > statement_timestamp() as waits
          from grouped
          left join lateral (
            select head.*
              from (select grouped.queue, grouped.handler, grouped.asks as key) line
             cross join lateral ({_HEAD}) head
          ) head on grouped.asks is not null
      ) asked
    window line as (partition by queue, handler, key)
), behind as materialized (
    select spread.id, spread.head,
           spread.head = any(array(select id from taken)) as ours
      from spread
     where spread.head < spread.id
       and (spread.waits or (select count(*) from seen) >= %(window)s)
       and spread.id <> all(array(select id from taken))
), theirs as materialized (
    select waiting.id, ahead.id as head
      from behind
     cross join lateral (
        select m.id from django_mq_queuedmessage m where m.id = behind.head
           for key share skip locked
     ) ahead
     cross join {_WAITING}
     where not behind.ours
), ours as materialized (
    select waiting.id, behind.head
      from behind
     cross join {_WAITING}
     where behind.ours
), parked as (
    update django_mq_queuedmessage m
       set blocked_by = behind.head
      from (select * from ours union all select * from theirs) behind
     where m.id = any(array[behind.id])
    returning m.id
), claimed as (
    update django_mq_queuedmessage m
       set attempts = {NEXT_ATTEMPT}, claimed_by = %(claimer)s, blocked_by = null,
           leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
      from taken
     where m.id = any(array[taken.id])
    returning {claimed_columns(payload="taken.payload")},
              taken.turn
)
select claimed.*, further.found
  from (
    select exists (select from parked) and (select count(*) from seen) >= %(window)s as found
  ) further
  left join claimed on true
"""  # noqa: S608


def claim(
    cursor: Cursor,
    *,
    lanes: Sequence[Lane],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    skip_dead: bool,
    admitted: bool = False,
) -> Claim:
    """Take up to `limit` due messages of `lanes`, with keys and without; as `claim.claim()`.

    Of each key the first ones, unbroken: a dead head (unless `skip_dead`), a delayed, retrying
    or claimed one blocks what is behind it, which is parked: `blocked_by` its head. The caller
    has opened a transaction, and commits it at once. There are no marks: what is freed may lie
    before them.
    """
    given = {
        **lane_columns(lanes),
        "limit": limit,
        "window": max(WINDOW, limit),
        "skip_dead": skip_dead,
        "admitted": admitted,
    }
    cursor.execute(LOCK_LINES, given)
    lines = cursor.fetchall()
    cursor.execute(
        CLAIM_LINES,
        {
            **given,
            "line_queues": [line[0] for line in lines],
            "line_handlers": [line[1] for line in lines],
            "line_keys": [line[2] for line in lines],
            "line_places": [line[3] for line in lines],
            "claimer": claimer,
            "lease": lease,
            "bytes": max_bytes,
        },
    )
    rows = cursor.fetchall()
    found = sorted((row for row in rows if row[0] is not None), key=_turn)
    return Claim([ClaimedRow._make(row[:WIDTH]) for row in found], {}, further=rows[0][-1])


def _turn(row: Sequence[int]) -> int:
    return row[-2]
