"""The names of all queues, found by loose index scans: one probe per queue and index."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: The row with this name records the turn of the chores; it is not a queue.
CHORES = ":"

# A blocked row has a key, so the four indexes together cover every row.
NAMES = """
with recursive waiting (queue) as (
    (select m.queue
       from django_mq_queuedmessage m
      where m.leased_until is null and m.blocked_by is null and m.dead_at is null
      order by m.queue
      limit 1)
    union all
    select (select m.queue
              from django_mq_queuedmessage m
             where m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and m.queue > waiting.queue
             order by m.queue
             limit 1)
      from waiting
     where waiting.queue is not null
), leased (queue) as (
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
), keyed (queue) as (
    (select m.queue
       from django_mq_queuedmessage m
      where m.key is not null
      order by m.queue
      limit 1)
    union all
    select (select m.queue
              from django_mq_queuedmessage m
             where m.key is not null and m.queue > keyed.queue
             order by m.queue
             limit 1)
      from keyed
     where keyed.queue is not null
), dead (queue) as (
    (select m.queue
       from django_mq_queuedmessage m
      where m.dead_at is not null
      order by m.queue
      limit 1)
    union all
    select (select m.queue
              from django_mq_queuedmessage m
             where m.dead_at is not null and m.queue > dead.queue
             order by m.queue
             limit 1)
      from dead
     where dead.queue is not null
)
select queue from waiting where queue is not null
 union
select queue from leased where queue is not null
 union
select queue from keyed where queue is not null
 union
select queue from dead where queue is not null
 union
select queue from django_mq_queuestate
"""


def names(cursor: Cursor) -> set[str]:
    """Return the queues that have messages or a QueueState row."""
    cursor.execute(NAMES)
    return {row[0] for row in cursor.fetchall()} - {CHORES}
