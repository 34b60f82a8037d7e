"""How many messages of its queue are claimed before a waiting one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mq.store.readers import prepare_to_read

if TYPE_CHECKING:
    from django_mq.store import Cursor

# Walks lane by lane over the first due messages: a million messages of a higher priority may be
# delayed, and a million of its own may be due at the same moment.
AHEAD = """
with recursive message as materialized (
    select m.id, m.queue, m.priority, m.processable_after
      from django_mq_queuedmessage m
     where m.id = %(id)s
), lane (queue, priority) as (
    select message.queue, highest.priority
      from message
     cross join lateral (
        select m.priority
          from django_mq_queuedmessage m
         where m.queue = message.queue
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
         order by m.priority desc
         limit 1
     ) highest
    union all
    select lane.queue, following.priority
      from lane
     cross join message
     cross join lateral (
        select m.priority
          from django_mq_queuedmessage m
         where m.queue = lane.queue and m.priority < lane.priority
           and m.priority >= message.priority
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
         order by m.priority desc
         limit 1
     ) following
)
select count(*)
  from (
    select
      from message
     cross join lane
     cross join lateral (
        select m.processable_after, m.id
          from django_mq_queuedmessage m
         where m.queue = lane.queue and m.priority = lane.priority
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
           and m.processable_after <= statement_timestamp()
         order by m.processable_after, m.id
         limit %(most)s
     ) first
     where lane.priority > message.priority
        or lane.priority = message.priority
           and (first.processable_after, first.id) < (message.processable_after, message.id)
     limit %(most)s
  ) ahead
"""


def ahead(cursor: Cursor, *, id: int, most: int) -> int:
    """Return how many due messages are claimed before message `id`, which waits; at most `most`."""
    prepare_to_read(cursor)
    cursor.execute(AHEAD, {"id": id, "most": most})
    return int(cursor.fetchone()[0])
