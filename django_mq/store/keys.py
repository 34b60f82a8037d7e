"""Order keys: claim what is first of its key, park what waits behind, free what comes next.

The line of a key is (queue, handler, key); its head is the row with the lowest id. A row is taken
only together with every earlier one of its line, and only while no row of the line carries a
claim, so at most one worker has a line. Claims of one line exclude each other by an advisory
lock, taken in a statement of its own: the snapshot of the claim follows the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.store.claim import Claim, Lane, lane_columns

if TYPE_CHECKING:
    from datetime import datetime

    from django_mq.store import Cursor

#: So many waiting rows one claim looks at, or as many as it may take. When as many are met, those
#: that cannot be taken are parked out of the way: no claim walks over a long line twice.
WINDOW = 250

_WINDOW = """
    select window_.*, row_number() over () as n
      from (
        select row_.*
          from (
            select lane.*
              from unnest(%(queues)s::text[], %(priorities)s::smallint[],
                          %(ats)s::timestamptz[], %(ids)s::bigint[])
                   with ordinality as lane (queue, priority, at, id, place)
             where not exists (
                select from django_mq_queuestate s
                 where s.queue = lane.queue
                   and (s.paused_at is not null
                        and (s.paused_until is null or s.paused_until > statement_timestamp())
                        or not %(admitted)s
                        and (s.backoff_level > 0 or s.max_in_flight is not null)))
             order by lane.place
          ) lane
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
"""

# The head of a line; with skip_dead a dead one does not count. Asked with = the planner may walk
# the primary key instead, over whatever was settled since the last vacuum: 10 ms, not 0.01.
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
       and not exists (
            select from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler and m.key = line.key
               and m.leased_until is not null)
"""

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
"""  # noqa: S608  (made of our own texts, as is the next)

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
               and m.key >= head.key and m.key <= head.key
               and m.id >= head.id and (m.dead_at is null or not %(skip_dead)s)
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
    select m.id, m.processable_after as at, m.payload::text as payload,
           chosen.n, chosen.place, chosen.lined
      from chosen
      join django_mq_queuedmessage m on m.id = chosen.id
     where m.dead_at is null and m.leased_until is null
       and m.processable_after <= statement_timestamp()
     order by chosen.place, chosen.n
     limit %(limit)s
       for no key update of m skip locked
), taken as materialized (
    select id, at, payload, place, n, turn
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
      join django_mq_queuedmessage ahead on ahead.id = behind.head
      join django_mq_queuedmessage waiting on waiting.id = behind.id
     where not behind.ours
       and waiting.leased_until is null and waiting.blocked_by is null
       and waiting.dead_at is null
       for key share of ahead skip locked
       for no key update of waiting skip locked
), ours as materialized (
    select waiting.id, behind.head
      from behind
      join django_mq_queuedmessage waiting on waiting.id = behind.id
     where behind.ours
       and waiting.leased_until is null and waiting.blocked_by is null
       and waiting.dead_at is null
       for no key update of waiting skip locked
), parked as (
    update django_mq_queuedmessage m
       set blocked_by = behind.head
      from (select * from ours union all select * from theirs) behind
     where m.id = behind.id
    returning m.id
), claimed as (
    update django_mq_queuedmessage m
       set attempts = m.attempts + 1, claimed_by = %(claimer)s, blocked_by = null,
           leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
      from taken
     where m.id = taken.id
    returning m.id, m.queue, m.type, m.handler, m.schema_version, taken.payload, m.metadata::text,
              m.priority, m.key, m.attempts, m.max_attempts, m.retry::text, m.claimed_by,
              m.wants_result, m.suspect,
              extract(epoch from statement_timestamp() - m.held_since)::float8,
              m.created_at, statement_timestamp(), m.unique_id, m.ordered,
              extract(epoch from statement_timestamp()
                                 - greatest(m.created_at, m.processable_after))::float8,
              taken.at, taken.turn, taken.place
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
    has opened a transaction, and commits it at once.
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
    marks: dict[tuple[str, int], tuple[datetime, int]] = {}
    for row in found:
        if row[23] == 1:  # followers come from further on: they do not move the mark
            lane = row[1], row[7]
            marks[lane] = max(marks.get(lane, (row[21], 0)), (row[21], row[0]))
    return Claim([ClaimedRow._make(row[:21]) for row in found], marks, further=rows[0][-1])


def _turn(row: Sequence[int]) -> int:
    return row[22]


class Line(NamedTuple):
    """The line of a key."""

    queue: str
    handler: str
    key: str


# Freeing a row that is still behind another is harmless: the next claim parks it again. The heads
# come first: where the planner thinks that few are parked it would begin with those.
FREE_NEXT = """
with head as materialized (
    select head.id
      from unnest(%(queues)s::text[], %(handlers)s::text[], %(keys)s::text[])
           as line (queue, handler, key)
     cross join lateral (
        select m.id, m.blocked_by
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and m.key >= line.key and m.key <= line.key
           and m.dead_at is null
         order by m.key, m.id
         limit 1
     ) head
     where head.blocked_by is not null
)
update django_mq_queuedmessage m
   set blocked_by = null
  from (
    select m.id
      from head
      join django_mq_queuedmessage m on m.id = head.id
       for no key update of m skip locked
  ) following
 where m.id = following.id
"""


def free_next(cursor: Cursor, lines: Iterable[Line]) -> None:
    """Free what is now the first of each of `lines`: whatever was before it is gone, or dead."""
    found = sorted(set(lines))
    if found:
        queues, handlers, keys = zip(*found, strict=True)
        cursor.execute(
            FREE_NEXT, {"queues": list(queues), "handlers": list(handlers), "keys": list(keys)}
        )


# A row that was parked while its head was being settled, or whose head somebody deleted by hand.
FREE_STRANDED = """
with recursive blocker as (
    (select m.blocked_by as id
       from django_mq_queuedmessage m
      where m.blocked_by is not null
      order by m.blocked_by
      limit 1)
    union all
    select (select m.blocked_by
              from django_mq_queuedmessage m
             where m.blocked_by > blocker.id
             order by m.blocked_by
             limit 1)
      from blocker
     where blocker.id is not null
), stranded as (
    select line.queue, line.handler, line.key
      from blocker
      left join django_mq_queuedmessage head on head.id = blocker.id
     cross join lateral (
        select m.queue, m.handler, m.key
          from django_mq_queuedmessage m
         where m.blocked_by = blocker.id
         limit 1
     ) line
     where blocker.id is not null
       and (head.id is null or head.handler <> line.handler
            or head.dead_at is not null and line.queue = any(%(skipping)s::text[]))
     limit %(limit)s
), first as materialized (
    select head.id
      from stranded line
     cross join lateral (
        select m.id, m.blocked_by, m.dead_at
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and m.key >= line.key and m.key <= line.key
           and (m.dead_at is null or line.queue <> all(%(skipping)s::text[]))
         order by m.key, m.id
         limit 1
     ) head
     where head.blocked_by is not null and head.dead_at is null
)
update django_mq_queuedmessage m
   set blocked_by = null
  from (
    select m.id
      from first
      join django_mq_queuedmessage m on m.id = first.id
       for no key update of m skip locked
  ) free
 where m.id = free.id
returning m.id
"""


def free_stranded(cursor: Cursor, *, skipping: Sequence[str], limit: int) -> int:
    """Free the first of every line whose parked rows wait for one that is gone.

    Gone from the line: also when it was unrouted, and has a handler now. In the queues
    `skipping` a dead head counts as gone. Returns how many were freed.
    """
    cursor.execute(FREE_STRANDED, {"skipping": list(skipping), "limit": limit})
    return len(cursor.fetchall())
