"""Estimates of the messages of a queue by state, where counting would take too long."""

from __future__ import annotations

from collections.abc import Sequence

from django_mq.store import Cursor

#: Pages of the table that are read.
PAGES = 200

# The planner's statistics treat states and queues as independent, and miss rare queues. A random
# sample of pages shows the real combinations, at a cost that does not grow with the table.
# `repeatable` picks the same pages each time, so that an estimate changes only with the table.
ESTIMATES = """
with share (part) as (
    select least(1.0, %(pages)s::float8 * current_setting('block_size')::int
                      / greatest(1, pg_relation_size('django_mq_queuedmessage')))
)
select seen.queue, seen.state, round(count(*) / (select part from share))::bigint
  from (
    select m.queue,
           case when m.dead_at is not null then 'dead'
                when m.leased_until > statement_timestamp() then 'leased'
                when m.blocked_by is not null and m.leased_until is null then 'blocked'
                when m.held_since is not null then 'held'
                when m.expires_at <= statement_timestamp() then 'expired'
                when m.leased_until is not null
                  or m.processable_after <= statement_timestamp() then 'processable'
                when m.attempts > 0 then 'retrying'
                else 'delayed' end as state
      from django_mq_queuedmessage m
           tablesample system ((select 100 * part from share)) repeatable (1)
     where m.queue = any(%(queues)s::text[])
  ) seen
 group by seen.queue, seen.state
"""


def estimates(cursor: Cursor, *, queues: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return about how many messages each of the large `queues` has, by state.

    Reads 200 random pages. All messages in flight count as `leased`.
    """
    cursor.execute(ESTIMATES, {"queues": list(queues), "pages": PAGES})
    found: dict[str, dict[str, int]] = {name: {} for name in queues}
    for queue, state, count in cursor.fetchall():
        found[queue][state] = count
    return found
