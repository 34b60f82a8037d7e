"""Queues and their priorities, found by loose index scans: one probe for each, per index."""

from __future__ import annotations

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.gates import IS_PAUSED

#: The row with this name records the turn of the chores; no queue can have it.
CHORES_ROW = ":"

#: A CTE of WITH RECURSIVE: the priorities at which messages wait in `%(queues)s`.
LANES = f"""lane (queue, priority) as (
    select asked.queue, highest.priority
      from unnest(%(queues)s::text[]) as asked (queue)
     cross join lateral (
        select m.priority
          from django_mq_queuedmessage m
         where m.queue = asked.queue
           and {WAITS}
         order by m.priority desc
         limit 1
     ) highest
    union all
    select lane.queue, following.priority
      from lane
     cross join lateral (
        select m.priority
          from django_mq_queuedmessage m
         where m.queue = lane.queue and m.priority < lane.priority
           and {WAITS}
         order by m.priority desc
         limit 1
     ) following
)"""


def queue_scan(name: str, where: str) -> str:
    """Return a CTE of WITH RECURSIVE: the queues that have rows `m` with `where`, then a null."""
    return f"""{name} (queue) as (
    (select m.queue
       from django_mq_queuedmessage m
      where {where}
      order by m.queue
      limit 1)
    union all
    select (select m.queue
              from django_mq_queuedmessage m
             where {where} and m.queue > {name}.queue
             order by m.queue
             limit 1)
      from {name}
     where {name}.queue is not null
)"""


# A blocked row has a key, so the four indexes together cover every row.
NAMES = f"""
with recursive {queue_scan("waiting", WAITS)},
{queue_scan("leased", "m.leased_until is not null")},
{queue_scan("keyed", "m.key is not null")},
{queue_scan("dead", "m.dead_at is not null")}
select queue from waiting where queue is not null
 union
select queue from leased where queue is not null
 union
select queue from keyed where queue is not null
 union
select queue from dead where queue is not null
 union
select queue from django_mq_queuestate s
 where {IS_PAUSED} or max_in_flight is not null or backoff_level > 0 or owner is not null
"""


def names(cursor: Cursor) -> set[str]:
    """Return the queues that have messages, or a QueueState with a setting or decision in force."""
    cursor.execute(NAMES)
    return {row[0] for row in cursor.fetchall()} - {CHORES_ROW}
