"""Claim: take due messages for a lease, and look for what is due next.

The shape of each statement was found by experiment: MATERIALIZED, so that no plan takes more
rows than asked for; LATERAL over lanes, so that the walk stops at the first full batch; the
UPDATE joins by id and never by ctid, since a row that changed between snapshot and lock has a
ctid which the statement cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow

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
    """What a claim took, in order, and for each lane it took from, the last row of its scan."""

    rows: list[ClaimedRow]
    marks: dict[tuple[str, int], tuple[datetime, int]]


CLAIM = """
with due as materialized (
    select d.*, row_number() over () as n
      from (
        select d.*
          from (
            select lane.*
              from unnest(%(queues)s::text[], %(priorities)s::smallint[],
                          %(ats)s::timestamptz[], %(ids)s::bigint[])
                   with ordinality as lane (queue, priority, at, id, place)
             where not exists (
                select from django_mq_queuestate s
                 where s.queue = lane.queue and s.paused_at is not null
                   and (s.paused_until is null or s.paused_until > statement_timestamp()))
             order by lane.place
          ) lane
         cross join lateral (
            select m.id, m.processable_after as at, m.payload::text as payload
              from django_mq_queuedmessage m
             where m.queue = lane.queue and m.priority = lane.priority
               and m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and (m.processable_after, m.id) > (lane.at, lane.id)
               and m.processable_after <= statement_timestamp()
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
returning m.id, m.queue, m.type, m.handler, m.schema_version, taken.payload, m.metadata::text,
          m.priority, m.key, m.attempts, m.max_attempts, m.retry::text, m.claimed_by,
          m.wants_result, m.suspect,
          extract(epoch from statement_timestamp() - m.held_since)::float8,
          m.created_at, statement_timestamp(), m.unique_id, m.ordered, taken.at,
          taken.n
"""


def claim(
    cursor: Cursor,
    *,
    lanes: Sequence[Lane],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
) -> Claim:
    """Take up to `limit` due messages of `lanes`, in their order, for `lease` seconds.

    Their payloads together have at most `max_bytes` of JSON text; one message is taken
    whatever its size. Within a lane: by due time, then id. What others have locked is skipped.
    """
    cursor.execute(
        CLAIM,
        {
            "queues": [lane.queue for lane in lanes],
            "priorities": [lane.priority for lane in lanes],
            "ats": [lane.at for lane in lanes],
            "ids": [lane.id for lane in lanes],
            "claimer": claimer,
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
        },
    )
    found = cursor.fetchall()
    found.sort(key=_place)  # RETURNING promises no order
    marks = {(row[1], row[7]): (row[20], row[0]) for row in found}
    return Claim([ClaimedRow._make(row[:20]) for row in found], marks)


def _place(row: Sequence[int]) -> int:
    return row[21]


# The claim that takes over a lapsed row writes down the attempt that vanished with its worker,
# and dead-letters the message when that was its last. `suspect` is returned as it was before:
# a message that lapses a second time runs alone.
CLAIM_LAPSED = """
with found as materialized (
    select m.*, m.attempts < m.max_attempts as again
      from django_mq_queuedmessage m
     where m.queue = any(%(queues)s) and m.leased_until <= statement_timestamp()
       and not exists (
           select from django_mq_queuestate s
            where s.queue = m.queue and s.paused_at is not null
              and (s.paused_until is null or s.paused_until > statement_timestamp()))
     order by m.leased_until, m.id
     limit %(limit)s
       for no key update of m skip locked
), lapsed as materialized (
    select *
      from (
        select found.*, row_number() over line as n,
               sum(octet_length(payload::text)) over line as total
          from found
        window line as (order by leased_until, id)
      ) found
     where n = 1 or total <= %(bytes)s
), history as (
    insert into django_mq_failedattempt
           (message_id, queue, type, handler, attempt, worker, error_class, error_text, traceback)
    select id, queue, type, handler, attempts, split_part(claimed_by, ':', 1),
           'WorkerVanished', 'the lease lapsed: the worker died, froze or lost its database', ''
      from lapsed
)
update django_mq_queuedmessage m
   set attempts = m.attempts + lapsed.again::int,
       suspect = true,
       last_error = 'WorkerVanished: the lease lapsed',
       claimed_by = case when lapsed.again then %(claimer)s end,
       leased_until = case when lapsed.again
                           then statement_timestamp() + make_interval(secs => %(lease)s) end,
       dead_at = case when not lapsed.again then statement_timestamp() end,
       dead_reason = case when lapsed.again then '' else 'exhausted' end
  from lapsed
 where m.id = lapsed.id
returning m.id, m.queue, m.type, m.handler, m.schema_version, m.payload::text, m.metadata::text,
          m.priority, m.key, m.attempts, m.max_attempts, m.retry::text, coalesce(m.claimed_by, ''),
          m.wants_result, lapsed.suspect,
          extract(epoch from statement_timestamp() - m.held_since)::float8,
          m.created_at, statement_timestamp(), m.unique_id, m.ordered, lapsed.leased_until,
          lapsed.again
"""


class Lapsed(NamedTuple):
    """Lapsed rows: those that were taken over, and those whose last attempt had vanished."""

    taken: list[ClaimedRow]
    dead: list[ClaimedRow]


def claim_lapsed(
    cursor: Cursor,
    *,
    queues: Sequence[str],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
) -> Lapsed:
    """Take over up to `limit` messages of `queues` whose lease lapsed, longest lapsed first.

    `max_bytes` as for `claim()`.

    A row that its worker still has locked is running, however old its lease, and is skipped.
    In a paused queue nothing is taken over: it may be paused because its messages kill workers.
    """
    cursor.execute(
        CLAIM_LAPSED,
        {
            "queues": list(queues),
            "claimer": claimer,
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
        },
    )
    found = sorted(cursor.fetchall(), key=lambda row: (row[20], row[0]))
    taken = [ClaimedRow._make(row[:20]) for row in found if row[21]]
    dead = [ClaimedRow._make(row[:20]) for row in found if not row[21]]
    return Lapsed(taken, dead)


# Loose index scans over mq_claim and mq_lease: one probe a lane and a queue, however many rows
# wait in it or are leased.
LOOK = """
with recursive lane as (
    (select m.queue, m.priority
       from django_mq_queuedmessage m
      where m.leased_until is null and m.blocked_by is null and m.dead_at is null
      order by m.queue, m.priority desc
      limit 1)
    union all
    select following.*
      from lane
     cross join lateral (
        (select m.queue, m.priority
           from django_mq_queuedmessage m
          where m.leased_until is null and m.blocked_by is null and m.dead_at is null
            and m.queue = lane.queue and m.priority < lane.priority
          order by m.priority desc
          limit 1)
        union all
        (select m.queue, m.priority
           from django_mq_queuedmessage m
          where m.leased_until is null and m.blocked_by is null and m.dead_at is null
            and m.queue > lane.queue
          order by m.queue, m.priority desc
          limit 1)
        limit 1
     ) following
), leased as (
    (select m.queue
       from django_mq_queuedmessage m
      where m.leased_until is not null
      order by m.queue
      limit 1)
    union all
    select (select m.queue
              from django_mq_queuedmessage m
             where m.leased_until is not null and m.queue > leased.queue
             order by m.queue
             limit 1)
      from leased
     where leased.queue is not null
)
select lane.queue, lane.priority, due.found is not null,
       extract(epoch from next.at - statement_timestamp())::float8, false
  from lane
  left join lateral (
    select true as found
      from django_mq_queuedmessage m
     where m.queue = lane.queue and m.priority = lane.priority
       and m.leased_until is null and m.blocked_by is null and m.dead_at is null
       and m.processable_after <= statement_timestamp()
       and not exists (
           select from django_mq_queuestate s
            where s.queue = lane.queue and s.paused_at is not null
              and (s.paused_until is null or s.paused_until > statement_timestamp()))
     order by m.processable_after
     limit 1
  ) due on true
  left join lateral (
    select m.processable_after as at
      from django_mq_queuedmessage m
     where m.queue = lane.queue and m.priority = lane.priority
       and m.leased_until is null and m.blocked_by is null and m.dead_at is null
       and m.processable_after > statement_timestamp()
     order by m.processable_after
     limit 1
  ) next on true
union all
select leased.queue, 0, false, null, true
  from leased
 where leased.queue is not null
"""


class Seen(NamedTuple):
    """A lane as it stands: is anything due, and in how many seconds is the next message?

    With `leased` it is no lane, but a queue in which messages are leased.
    """

    queue: str
    priority: int
    due: bool
    next_in: float | None
    leased: bool


def look(cursor: Cursor) -> list[Seen]:
    """Return every lane in which messages wait (a paused queue has nothing due), and more."""
    cursor.execute(LOOK)
    return [Seen._make(row) for row in cursor.fetchall()]
