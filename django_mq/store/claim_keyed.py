"""Claim from queues with order keys: take the first messages of each key, park those behind.

The line of a key is (queue, handler, key); its head is the row with the lowest id. A claim takes a
row only together with every earlier row of its line, and only while no row of the line is claimed,
so at most one worker has a line. An advisory lock keeps two claims from the same line. A separate
statement takes it first, so that the claim's snapshot is newer than the lock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from django_mq.messages import ClaimedRow
from django_mq.store import array, texts
from django_mq.store.advisory_locks import KEYED_CLAIM
from django_mq.store.claim import EXCLUDED, OPEN_LANES, Claim, Lane, excluding, lane_columns
from django_mq.store.claimed_row import COLUMN_COUNT, NEXT_ATTEMPT, claimed_columns

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: The number of waiting rows that one claim examines, unless it may take more. A claim that fills
#: its window parks the rows that it cannot take, so that no claim scans a long line twice.
WINDOW = 250

_WINDOW = f"""
    select window_.*, row_number() over () as n
      from (
        select row_.*
          from ({OPEN_LANES}) lane
         cross join lateral (
            select m.id, m.queue, m.handler, m.key, m.priority, m.processable_after as at
              from django_mq_queuedmessage m
             where m.queue = lane.queue and m.priority = lane.priority
               and m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and (m.processable_after, m.id) > (lane.at, lane.id)
               and m.processable_after <= statement_timestamp() {EXCLUDED}
             order by m.processable_after, m.id
             limit %(window)s
         ) row_
         limit %(window)s
      ) window_
"""

# With key = line.key, the planner may scan mq_lease, over all rows leased since the oldest held
# snapshot was taken: 300 pages per line among 2,000 dead leases.
_NONE_LEASED = """
           (select m.id
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler
               and m.key >= line.key and m.key <= line.key
               and m.leased_until is not null
             order by m.key
             limit 1) is null
"""

# A row to park, locked if it still waits. With the conditions of mq_claim, the planner might scan
# that index for the id.
_WAITING = """lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = behind.id
           and num_nonnulls(m.leased_until, m.blocked_by, m.dead_at) = 0
           for no key update skip locked
     ) waiting"""

# OFFSET 0: only lines with nothing in flight are locked; the limit counts only lines that no other
# session has locked. The claim itself finds out whether the head waits.
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
     where {_NONE_LEASED}
    offset 0
  ) line
 where pg_try_advisory_xact_lock(
           hashtextextended(line.queue || ' ' || line.handler || ' ' || line.key, {KEYED_CLAIM}))
 limit %(limit)s
"""

# The head of a line is its first row; with skip_dead, the first that is not dead. A row whose key
# has changed since the snapshot is in a line that is not locked: it is left out. With key =
# line.key, or an order by id alone, the planner may scan the primary key, over every row settled
# since the last vacuum: 10 ms instead of 0.01. While a session holds a snapshot, a lookup walks
# over the dead entries of its key, so there is one per line, from its first taken row on, if any.
CLAIM_LINES = f"""
with seen as materialized ({_WINDOW}), line as materialized (
    select line.*
      from unnest(%(line_queues)s::text[], %(line_handlers)s::text[], %(line_keys)s::text[],
                  %(line_numbers)s::bigint[]) as line (queue, handler, key, n)
     where {_NONE_LEASED}
), room as materialized (
    select greatest(
        (%(limit)s - (select count(*) from seen where key is null) - 1)
            / greatest((select count(*) from line), 1) + 1,
        1) as each
), run as (
    select row_.*, row_number() over run as ordinal, bool_and(row_.ok) over run as unbroken
      from (
        select m.id, line.key, line.n, m.ok
          from line
         cross join lateral (
            select m.id,
                   m.dead_at is null and m.leased_until is null {EXCLUDED}
                   and m.processable_after <= statement_timestamp() as ok
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler
               and m.key >= line.key and m.key <= line.key
               and (m.dead_at is null or not %(skip_dead)s)
             order by m.key, m.id
             limit (select each from room)
         ) m
      ) row_
    window run as (partition by row_.n order by row_.id)
), chosen as materialized (
    select run.id, run.key, run.n, run.ordinal, true as lined from run where run.unbroken
    union all
    select seen.id, null, seen.n, 1, false from seen where seen.key is null
), locked as materialized (
    select m.id, m.payload::text as payload, chosen.n, chosen.ordinal, chosen.lined
      from (select * from chosen order by ordinal, n) chosen
     cross join lateral (
        select m.id, m.payload
          from django_mq_queuedmessage m
         where m.id = chosen.id and m.key is not distinct from chosen.key and m.dead_at is null
           and m.leased_until is null and m.processable_after <= statement_timestamp()
           for no key update skip locked
     ) m
     limit %(limit)s
), taken as materialized (
    select id, payload, turn
      from (
        select locked.*, row_number() over turns as turn,
               sum(octet_length(payload)) over turns as total
          from (
            select locked.*, row_number() over (partition by lined, n order by ordinal) as nth
              from locked
          ) locked
         where nth = ordinal
        window turns as (order by ordinal, n)
      ) locked
     where turn = 1 or total <= %(bytes)s
), marked as materialized (
    select seen.*, id in (select id from taken) as is_taken
      from seen
), cutoff as materialized (
    select case when (select count(*) from taken) < %(limit)s then %(window)s
                else max(n) filter (where is_taken) end as n
      from marked
), by_line as (
    select marked.*,
           case when n = min(n) filter (where not is_taken) over line
                 and (bool_or(is_taken) over line or n <= (select n from cutoff))
                then key end as head_key,
           coalesce(min(id) filter (where is_taken) over line, -9223372036854775807) as after
      from marked
     where key is not null and (select bool_or(not is_taken) from marked)
    window line as (partition by queue, handler, key)
), with_head as (
    select id, is_taken, max(head) over line as head, bool_or(waits) over line as waits
      from (
        select by_line.*, head.id as head,
               head.dead_at is not null or head.at > statement_timestamp() as waits
          from by_line
          left join lateral (
            select m.id, m.dead_at, m.processable_after as at
              from django_mq_queuedmessage m
             where m.queue = by_line.queue and m.handler = by_line.handler
               and (m.key, m.id) >= (by_line.head_key, by_line.after) and m.key <= by_line.head_key
               and (m.dead_at is null or not %(skip_dead)s)
             order by m.key, m.id
             limit 1
          ) head on by_line.head_key is not null
      ) asked
    window line as (partition by queue, handler, key)
), behind as materialized (
    select with_head.id, with_head.head, with_head.head in (select id from taken) as ours
      from with_head
     where with_head.head < with_head.id and not with_head.is_taken
       and (with_head.waits or (select count(*) from seen) >= %(window)s)
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
       set attempts = {NEXT_ATTEMPT}, blocked_by = null,
           claimed_by = (%(claimers)s::text[])[(taken.turn - 1) / %(each)s + 1],
           leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
      from taken
     where m.id = any(array[taken.id])
    returning {claimed_columns(payload="taken.payload")},
              taken.turn
), passed as (
    select distinct on (queue, priority) queue, priority, at, id
      from (
        select seen.*,
               bool_and(id in (select id from taken union all select id from parked))
                   over (order by n) as is_passed
          from seen
         where %(with_marks)s::bool
      ) seen
     where is_passed
     order by queue, priority, n desc
)
select claimed.*, further.found, case when row_number() over () = 1 then further.marks end
  from (
    select exists (select from parked)
           and ((select count(*) from seen) >= %(window)s
                or cardinality(%(line_numbers)s::bigint[]) >= %(limit)s) as found,
           (select json_agg(json_build_array(queue, priority, date_part('epoch', at), id))::text
              from passed) as marks
  ) further
  left join claimed on true
"""


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
    more_claimers: Sequence[str] = (),
    excluded: Sequence[int] = (),
    with_marks: bool = True,
) -> Claim:
    """Take up to `limit` due messages of `lanes`, with and without keys; see `claim.claim()`.

    From each key it takes the first messages, without a gap. A head that is dead (unless
    `skip_dead`), delayed, retrying or claimed blocks those behind it; they are parked, with
    `blocked_by` set to the head. The caller opens a transaction and commits it at once. The marks
    pass only messages that were taken or parked, so messages freed later lie before them.
    `with_marks` returns the marks, for a seventh of the server's time. The `more_claimers` share
    the rows. Rows in `excluded`, and the rows behind them in their keys, are left out.
    """
    given = {
        **lane_columns(lanes),
        "limit": limit,
        "window": (window := max(WINDOW, limit)),
        "skip_dead": skip_dead,
        "admitted": admitted,
        "claimers": array((claimer, *more_claimers)),
        "each": -(-limit // (1 + len(more_claimers))),
        "lease": lease,
        "bytes": max_bytes,
        "with_marks": with_marks,
        "excluded": array(excluded),
    }
    for lines in limit, window:
        cursor.execute(excluding(LOCK_LINES, excluded), {**given, "limit": lines})
        locked = cursor.fetchall()
        cursor.execute(excluding(CLAIM_LINES, excluded), {**given, **_line_columns(locked)})
        rows = cursor.fetchall()
        # If nothing was taken or parked, other sessions have locked rows of each of these lines.
        if rows[0][0] is not None or rows[0][-2] or len(locked) < lines:
            break
    found = sorted((row for row in rows if row[0] is not None), key=itemgetter(-3))
    passed = json.loads(rows[0][-1] or "[]")
    ends = {(queue, priority): (float(at), id) for queue, priority, at, id in passed}
    return Claim(
        [ClaimedRow._make(row[:COLUMN_COUNT]) for row in found], ends, unfinished=rows[0][-2]
    )


def _line_columns(lines: Sequence[Sequence[Any]]) -> dict[str, object]:
    *names, numbers = zip(*lines, strict=True) if lines else ((),) * 4
    columns = zip(("line_queues", "line_handlers", "line_keys"), map(texts, names), strict=True)
    return {**dict(columns), "line_numbers": array(numbers)}
