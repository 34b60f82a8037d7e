"""Look up the lanes, their due messages and next due times, and the special queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.gates import IS_PAUSED
from django_mq.store.queue_names import queue_scan

# Loose index scans over mq_claim, mq_lease and mq_key: one probe per lane and per queue, however
# many rows wait, are leased or have keys.
POLL = f"""
with recursive lane as (
    (select m.queue, m.priority
       from django_mq_queuedmessage m
      where {WAITS}
      order by m.queue, m.priority desc
      limit 1)
    union all
    select following.*
      from lane
     cross join lateral (
        (select m.queue, m.priority
           from django_mq_queuedmessage m
          where {WAITS}
            and m.queue = lane.queue and m.priority < lane.priority
          order by m.priority desc
          limit 1)
        union all
        (select m.queue, m.priority
           from django_mq_queuedmessage m
          where {WAITS}
            and m.queue > lane.queue
          order by m.queue, m.priority desc
          limit 1)
        limit 1
     ) following
),
{queue_scan("leased", "m.leased_until is not null")},
{queue_scan("keyed", "m.key is not null")}
select 'lane', lane.queue, lane.priority, due.found is not null,
       extract(epoch from next.at - statement_timestamp())::float8
  from lane
  left join lateral (
    select true as found
      from django_mq_queuedmessage m
     where m.queue = lane.queue and m.priority = lane.priority
       and {WAITS}
       and m.processable_after <= statement_timestamp()
       and not exists (
           select from django_mq_queuestate s
            where s.queue = lane.queue and {IS_PAUSED})
     order by m.processable_after
     limit 1
  ) due on true
  left join lateral (
    select m.processable_after as at
      from django_mq_queuedmessage m
     where m.queue = lane.queue and m.priority = lane.priority
       and {WAITS}
       and m.processable_after > statement_timestamp()
     order by m.processable_after
     limit 1
  ) next on true
union all
select 'leased', leased.queue, 0, false, null
  from leased
 where leased.queue is not null
union all
select 'keyed', keyed.queue, 0, false, null
  from keyed
 where keyed.queue is not null
union all
select case when {IS_PAUSED} then 'paused'
            when s.backoff_level > 0 then 'backing_off'
            else 'limited' end,
       s.queue, coalesce(s.max_in_flight, 0), false,
       extract(epoch from case when s.paused_at is not null
                                    and s.paused_until > statement_timestamp()
                               then s.paused_until
                               else s.backoff_until end - statement_timestamp())::float8
  from django_mq_queuestate s
 where {IS_PAUSED} or s.backoff_level > 0 or s.max_in_flight is not null
"""

# Reads nothing, yet the server resolves the names and checks the privileges.
CHECK_TABLES = """
select from django_mq_queuedmessage, django_mq_queuestate, django_mq_schedule where false
"""

# Changes nothing, yet a read-only server refuses it.
CHECK_WRITES = "update django_mq_queuestate set queue = queue where false"


class PolledRow(NamedTuple):
    """One fact about a queue; `kind` says which.

    - lane: messages wait with priority `number`; `due` if one is due, the next in `next_in` seconds
    - leased: it has leased messages
    - keyed: it has messages with order keys
    - limited: at most `number` messages may be in flight
    - backing_off: it backs off for `next_in` more seconds (below zero: until a probe ends)
    - paused: it is paused for `next_in` more seconds (None: until it is resumed)
    """

    kind: str
    queue: str
    number: int
    due: bool
    next_in: float | None


def check_tables(cursor: Cursor) -> None:
    """Raise the server's error if the tables are missing, or if this login may not read them."""
    cursor.execute(CHECK_TABLES)


def check_writes(cursor: Cursor) -> None:
    """Raise the server's error if it is read only."""
    cursor.execute(CHECK_WRITES)


def poll(cursor: Cursor) -> list[PolledRow]:
    """Return the facts of all queues; in a paused queue nothing is due."""
    cursor.execute(POLL)
    return [PolledRow._make(row) for row in cursor.fetchall()]


MOVES = f"""
select exists (
    select
      from unnest(%(queues)s::text[]) as asked (queue)
      left join lateral (
        select m.dead_at, m.leased_until, m.processable_after as at
          from django_mq_queuedmessage m
         where m.queue >= asked.queue and m.queue <= asked.queue and m.ordered
           and (m.dead_at is null or asked.queue <> all(%(skipping)s::text[]))
         order by m.queue, m.id
         limit 1
     ) head on true
     where head.dead_at is null
       and (head.leased_until is not null or head.at <= statement_timestamp() or head.at is null)
       and not exists (
           select from django_mq_queuedmessage m
            where m.queue = asked.queue
              and m.leased_until > statement_timestamp() + make_interval(secs => %(soon)s))
       and not exists (
           select from django_mq_queuestate s
            where s.queue = asked.queue
              and (s.backoff_until > statement_timestamp() or s.max_in_flight = 0 or {IS_PAUSED})))
"""


def any_line_moves(
    cursor: Cursor, *, queues: Sequence[str], skipping: Sequence[str], soon: float
) -> bool:
    """Return whether the line of any of `queues`, each with a due message, moves on by itself.

    A line does if its head is due or in flight, or if the due message is not in the line yet; but
    not if a message of the queue has a lease of more than `soon` seconds. `skipping` names the
    queues in which dead messages are skipped.
    """
    cursor.execute(MOVES, {"queues": list(queues), "skipping": list(skipping), "soon": soon})
    return bool(cursor.fetchone()[0])
