"""Figures over time: the rows of workers by minute, and their sums by hour."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from django_mq.policy.column_bounds import MAX_FIGURE
from django_mq.store import Cursor


class MinuteRow(NamedTuple):
    """Absolute counts of one worker in one minute (in seconds since 1970); histograms by bucket."""

    minute: int
    queue: str
    handler: str
    acked: int
    failed: int
    retried: int
    dead: int
    waited: dict[int, int]
    ran: dict[int, int]


class ArrivalCount(NamedTuple):
    """Absolute count of the messages created in a minute whose first attempt has ended."""

    minute: int
    queue: str
    handler: str
    messages: int


# Absolute counts: a statement that is repeated after a lost answer counts nothing twice.
WRITE = """
insert into django_mq_minutefigures
       (minute, worker, queue, handler, acked, failed, retried, dead, waited, ran)
select to_timestamp(r.minute), %(worker)s, r.queue, r.handler,
       r.acked, r.failed, r.retried, r.dead, r.waited, r.ran
  from jsonb_to_recordset(%(rows)s::jsonb)
       as r (minute float8, queue text, handler text, acked bigint, failed bigint, retried bigint,
             dead bigint, waited jsonb, ran jsonb)
    on conflict (minute, worker, queue, handler) do update
   set acked = excluded.acked, failed = excluded.failed, retried = excluded.retried,
       dead = excluded.dead, waited = excluded.waited, ran = excluded.ran
"""


def write(cursor: Cursor, *, worker: str, rows: Sequence[MinuteRow]) -> None:
    """Store the counts of `worker`, replacing those that it stored for the same minutes."""
    text = json.dumps([row._asdict() for row in rows])
    cursor.execute(WRITE, {"worker": worker, "rows": text})


WRITE_ARRIVED = """
insert into django_mq_minutefigures (minute, worker, queue, handler, broadcast)
select to_timestamp(r.minute), %(worker)s, r.queue, r.handler, r.messages
  from jsonb_to_recordset(%(rows)s::jsonb)
       as r (minute float8, queue text, handler text, messages bigint)
    on conflict (minute, worker, queue, handler) do update
   set broadcast = excluded.broadcast
"""


def write_arrived(cursor: Cursor, *, worker: str, rows: Sequence[ArrivalCount]) -> None:
    """Store how many messages arrived by minute, replacing what `worker` stored before."""
    text = json.dumps([row._asdict() for row in rows])
    cursor.execute(WRITE_ARRIVED, {"worker": worker, "rows": text})


# Adds up the next hour that has figures, once another hour has passed: until then workers write to
# it. The hours are those of UTC: time zones of half an hour would shift them, and the bins of the
# pages.
ROLL_UP = """
with rolled as materialized (
    select max(h.hour) as hour from django_mq_hourfigures h where h.hour <= statement_timestamp()
), next as materialized (
    select date_trunc('hour', first.minute, 'UTC') as hour
      from (
        select m.minute
          from django_mq_minutefigures m
         where m.minute >= coalesce((select hour from rolled) + interval '1 hour', '-infinity')
         order by m.minute
         limit 1
     ) first
     where date_trunc('hour', first.minute, 'UTC') + interval '2 hours' <= statement_timestamp()
), part as materialized (
    select m.*
      from next
      join django_mq_minutefigures m
        on m.minute >= next.hour and m.minute < next.hour + interval '1 hour'
), bucket as (
    select part.queue, part.handler, each.histogram, each.name,
           least(sum(each.count::numeric::bigint), %(maximum)s) as n
      from part
     cross join lateral (
        select 'waited' as histogram, w.key as name, w.value as count
          from jsonb_each_text(part.waited) w
         union all
        select 'ran', r.key, r.value from jsonb_each_text(part.ran) r
     ) each
     group by part.queue, part.handler, each.histogram, each.name
), added as (
    insert into django_mq_hourfigures
           (hour, queue, handler, acked, failed, retried, dead, broadcast, waited, ran)
    select (select hour from next), each.queue, each.handler,
           least(sum(each.acked), %(maximum)s), least(sum(each.failed), %(maximum)s),
           least(sum(each.retried), %(maximum)s), least(sum(each.dead), %(maximum)s),
           least(sum(each.broadcast), %(maximum)s),
           coalesce(max(each.waited)::jsonb, '{}'), coalesce(max(each.ran)::jsonb, '{}')
      from (
        select part.queue, part.handler,
               part.acked, part.failed, part.retried, part.dead, part.broadcast,
               null as waited, null as ran
          from part
         union all
        select bucket.queue, bucket.handler, 0, 0, 0, 0, 0,
               (jsonb_object_agg(bucket.name, bucket.n) filter (where histogram = 'waited'))::text,
               (jsonb_object_agg(bucket.name, bucket.n) filter (where histogram = 'ran'))::text
          from bucket
         group by bucket.queue, bucket.handler
     ) each
     group by each.queue, each.handler
        on conflict (hour, queue, handler) do nothing
)
select exists (select from next)
"""


def roll_up(cursor: Cursor) -> bool:
    """Add up the next hour that workers no longer write; return whether there was one.

    Its minutes stay: they are more precise. An hour is added up once.
    """
    cursor.execute(ROLL_UP, {"maximum": MAX_FIGURE})
    return bool(cursor.fetchone()[0])


def _prune(table: str, column: str) -> str:
    # A time in the future was not written by this clock.
    return f"""
delete from {table}
 where id = any(array(
    select id from {table}
     where {column} < statement_timestamp() - make_interval(secs => %(older_than)s)
     order by {column}
     limit %(limit)s) || array(
    select id from {table}
     where {column} > statement_timestamp() + interval '1 day'
     order by {column}
     limit %(limit)s))
returning id
"""


PRUNE_MINUTES = _prune("django_mq_minutefigures", "minute")
PRUNE_HOURS = _prune("django_mq_hourfigures", "hour")


def prune(cursor: Cursor, *, minutes: float, hours: float, limit: int) -> int:
    """Delete figures by minute older than `minutes`, and by hour older than `hours`, in seconds.

    Deletes up to `limit` rows of each table; returns the larger of the two counts.
    """
    deleted = []
    for statement, older_than in ((PRUNE_MINUTES, minutes), (PRUNE_HOURS, hours)):
        cursor.execute(statement, {"older_than": older_than, "limit": limit})
        deleted.append(len(cursor.fetchall()))
    return max(deleted)
