"""The statement that takes the first messages of locked lines, and parks those behind them.

See `claim_keyed`, which runs it.
"""

from __future__ import annotations

from django_mq.store.claim import EXCLUDED
from django_mq.store.claimed_row import NEXT_ATTEMPT, claimed_columns, unstarted_claim
from django_mq.store.key_lines import NONE_LEASED, SEEN, SEEN_UNLOCKED

# A row to park, locked if it still waits. With the conditions of mq_claim, the planner might scan
# that index for the id.
_WAITING = """lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = behind.id
           and num_nonnulls(m.leased_until, m.blocked_by, m.dead_at) = 0
           for no key update skip locked
     ) waiting"""

# The rows of each CTE:
#
# | CTE        | rows                                                                           |
# |------------|--------------------------------------------------------------------------------|
# | seen       | the window: the waiting rows that this claim examines                          |
# | line       | the locked lines, unless one of their rows has been leased since               |
# | room       | one: per_line, the most rows to take of a line, as rows without a key leave it |
# | front      | the first rows of each line; unbroken: it and all before it may be claimed     |
# | chosen     | the unbroken rows of the fronts, and the rows seen without a key               |
# | locked     | those that still wait, now locked: the first of every line before the second   |
# | taken      | those without a gap before them in their line, as far as the bytes go          |
# | with_taken | seen, with whether the row is taken                                            |
# | cutoff     | one: the last seen_n for which heads are looked up; a full claim ends earlier  |
# | by_line    | seen rows with a key; one per line has the head_key, by which to find the head |
# | with_head  | the same with their head: waits if it is dead or not yet due; may_park: below   |
# | behind     | the rows to park; ours: this claim takes their head                            |
# | theirs     | rows to park behind heads that it does not take; both are locked               |
# | ours       | rows to park behind heads that it takes, locked                                |
# | parked     | the rows that are blocked now                                                  |
# | claimed    | the rows that are leased now                                                   |
# | passed     | the last row of each lane up to which all are taken or parked: the marks       |
#
# Rows are numbered: seen_n in the window (a line has that of its first row seen), line_n in the
# line, locked_n among the locked rows of the line (less than line_n behind a gap), taken_n in the
# claim.
#
# The head of a line is its first row; with skip_dead, the first that is not dead. A row whose key
# has changed since the snapshot is in a line that is not locked: it is left out. With key =
# line.key, or an order by id alone, the planner may scan the primary key, over every row settled
# since the last vacuum: 10 ms instead of 0.01. While a session holds a snapshot, a lookup walks
# over the dead entries of its key, so there is one per line, from its first taken row on, if any.
#
# Rows may_park if no other session is claiming their line: the head waits or is in flight, or the
# line is locked here. Another head may have been claimed and acked since the snapshot. To lock its
# old version, PostgreSQL waits for the ack in spite of SKIP LOCKED (heap_lock_updated_tuple_rec()
# of heapam.c), which may wait for the lock of another head: a deadlock. A head that waits or is in
# flight may be claimed or renewed, and then acked, while a long statement runs; so heads are locked
# in the order of ids, as acks lock them (settle.ORDER_BY_ID).
CLAIM_LINES = f"""
with seen as materialized ({SEEN}), line as materialized (
    select line.*
      from unnest(%(line_queues)s::text[], %(line_handlers)s::text[], %(line_keys)s::text[],
                  %(line_starts)s::bigint[], %(line_limits)s::bigint[])
           as line (queue, handler, key, seen_n, most)
     where {NONE_LEASED}
), room as materialized (
    select greatest(
        (%(limit)s - (select count(*) from seen where key is null) - 1)
            / greatest((select count(*) from line), 1) + 1,
        1) as per_line
), front as (
    select row_.*, row_number() over in_line as line_n,
           bool_and(row_.ok) over in_line as unbroken
      from (
        select m.id, line.key, line.seen_n, m.ok
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
             limit (select least(room.per_line, line.most) from room)
         ) m
      ) row_
    window in_line as (partition by row_.seen_n order by row_.id)
), chosen as materialized (
    select front.id, front.key, front.seen_n, front.line_n, true as lined
      from front
     where front.unbroken
    union all
    select seen.id, null, seen.seen_n, 1, false from seen where seen.key is null
), locked as materialized (
    select m.id, m.payload::text as payload, chosen.seen_n, chosen.line_n, chosen.lined
      from (select * from chosen order by line_n, seen_n) chosen
     cross join lateral (
        select m.id, m.payload
          from django_mq_queuedmessage m
         where m.id = chosen.id and m.key is not distinct from chosen.key and m.dead_at is null
           and m.leased_until is null and m.processable_after <= statement_timestamp()
           for no key update skip locked
     ) m
     limit %(limit)s
), taken as materialized (
    select id, payload, taken_n,
           (%(claimers)s::text[])[(taken_n - 1) / %(per_claimer)s + 1] as claimer
      from (
        select locked.*, row_number() over in_order as taken_n,
               sum(octet_length(payload)) over in_order as total
          from (
            select locked.*,
                   row_number() over (partition by lined, seen_n order by line_n) as locked_n
              from locked
          ) locked
         where locked_n = line_n
        window in_order as (order by line_n, seen_n)
      ) locked
     where taken_n = 1 or total <= %(bytes)s
), with_taken as materialized (
    select seen.*, id in (select id from taken) as is_taken
      from seen
), cutoff as materialized (
    select case when (select count(*) from taken) < %(limit)s then %(window)s
                else max(seen_n) filter (where is_taken) end as seen_n
      from with_taken
), by_line as (
    select with_taken.*,
           case when seen_n = min(seen_n) filter (where not is_taken) over line
                 and (bool_or(is_taken) over line or seen_n <= (select seen_n from cutoff))
                then key end as head_key,
           coalesce(min(id) filter (where is_taken) over line, -9223372036854775807) as from_id,
           (queue, handler, key) in (select queue, handler, key from line) as is_locked
      from with_taken
     where key is not null and %(park)s::bool and (select bool_or(not is_taken) from with_taken)
    window line as (partition by queue, handler, key)
), with_head as (
    select id, is_taken, max(head) over line as head, bool_or(waits) over line as waits,
           is_locked or bool_or(waits or in_flight) over line as may_park
      from (
        select by_line.*, head.id as head, head.leased_until is not null as in_flight,
               head.dead_at is not null or head.at > statement_timestamp() as waits
          from by_line
          left join lateral (
            select m.id, m.dead_at, m.leased_until, m.processable_after as at
              from django_mq_queuedmessage m
             where m.queue = by_line.queue and m.handler = by_line.handler
               and (m.key, m.id) >= (by_line.head_key, by_line.from_id)
               and m.key <= by_line.head_key
               and (m.dead_at is null or not %(skip_dead)s)
             order by m.key, m.id
             limit 1
          ) head on by_line.head_key is not null
      ) asked
    window line as (partition by queue, handler, key)
), behind as materialized (
    select with_head.id, with_head.head, with_head.head in (select id from taken) as ours
      from with_head
     where with_head.head < with_head.id and not with_head.is_taken and with_head.may_park
       and (with_head.waits or (select count(*) from seen) >= %(window)s)
), theirs as materialized (
    select waiting.id, ahead.id as head
      from (select * from behind order by head) behind
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
           claimed_by = taken.claimer,
           unstarted_claim = {unstarted_claim("taken.claimer")},
           leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
      from taken
     where m.id = any(array[taken.id])
    returning {claimed_columns(payload="taken.payload")},
              taken.taken_n
), passed as (
    select distinct on (queue, priority) queue, priority, at, id
      from (
        select seen.*,
               bool_and(id in (select id from taken union all select id from parked))
                   over (order by seen_n) as is_passed
          from seen
         where %(with_marks)s::bool
      ) seen
     where is_passed
     order by queue, priority, seen_n desc
)
select claimed.*, exists (select from seen where key is null), further.stuck, further.unfinished,
       case when row_number() over () = 1 then further.marks end
  from (
    select further.cut and exists (select from parked) as unfinished,
           further.cut and not exists (select from taken)
           and not (select bool_and(id in (select id from parked)) from seen) as stuck,
           (select json_agg(json_build_array(queue, priority, date_part('epoch', at), id))::text
              from passed) as marks
      from (
        select (select count(*) from seen) >= %(window)s
               or cardinality(%(line_starts)s::bigint[]) >= %(limit)s as cut
      ) further
  ) further
  left join claimed on true
"""
CLAIM_UNLOCKED_LINES = CLAIM_LINES.replace(SEEN, SEEN_UNLOCKED)
