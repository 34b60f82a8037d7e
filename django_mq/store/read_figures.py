"""Read figures: sums per step and per handler, and recent arrivals and departures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor


class FigureRow(NamedTuple):
    """The figures of a minute or an hour, `at` in seconds since 1970; histograms as JSON text."""

    at: int
    queue: str
    handler: str
    acked: int
    failed: int
    retried: int
    dead: int
    broadcast: int
    waited: str
    ran: str


_COLUMNS = """f.queue, f.handler, f.acked, f.failed, f.retried, f.dead, f.broadcast,
       f.waited::text, f.ran::text"""

# The time up to which hours are added up: such an hour is read as one row, later ones by minute.
_ROLLED = """rolled (until) as (
    select coalesce(max(h.hour) + interval '1 hour', '-infinity')
      from django_mq_hourfigures h
     where h.hour <= statement_timestamp()
)"""
# Python adds up the histograms: the server would take ten times as long.
PARTS = f"""
with {_ROLLED}
select date_part('epoch', f.minute)::bigint, {_COLUMNS}
  from rolled, django_mq_minutefigures f
 where f.minute >= greatest(to_timestamp(%(since)s), rolled.until)
   and f.minute <= statement_timestamp()
   and (%(queues)s::text[] is null or f.queue = any(%(queues)s::text[]))
 union all
select date_part('epoch', f.hour)::bigint, {_COLUMNS}
  from rolled, django_mq_hourfigures f
 where f.hour >= to_timestamp(%(since)s) and f.hour < rolled.until
   and (%(queues)s::text[] is null or f.queue = any(%(queues)s::text[]))
"""


def parts(cursor: Cursor, *, since: int, queues: Sequence[str] | None) -> list[FigureRow]:
    """Return the figures since a moment, in seconds since 1970; each message counts once."""
    cursor.execute(PARTS, {"since": float(since), "queues": queues})
    return [FigureRow._make(row) for row in cursor.fetchall()]


class HandlerCalls(NamedTuple):
    """How many attempts of a handler ended since a moment, and the last minute or hour of them."""

    handler: str
    attempts: int
    last_at: datetime


# A message that died without an attempt counts only as dead.
CALLS = f"""
with {_ROLLED}, part as (
    select f.minute as at, f.handler, f.acked + f.failed as attempts
      from rolled, django_mq_minutefigures f
     where f.minute >= greatest(statement_timestamp() - make_interval(secs => %(since)s),
                                rolled.until)
       and f.minute <= statement_timestamp()
    union all
    select f.hour, f.handler, f.acked + f.failed
      from rolled, django_mq_hourfigures f
     where f.hour >= statement_timestamp() - make_interval(secs => %(since)s)
       and f.hour < rolled.until
)
select part.handler, sum(part.attempts)::bigint, max(part.at)
  from part
 where part.attempts > 0
 group by part.handler
"""


def calls(cursor: Cursor, *, since: float) -> dict[str, HandlerCalls]:
    """Return the attempts of each handler in the last `since` seconds, whoever ran them."""
    cursor.execute(CALLS, {"since": since})
    return {row[0]: HandlerCalls._make(row) for row in cursor.fetchall()}


class Unsuccessful(NamedTuple):
    """A handler that acked nothing in a queue, and how many attempts ended there."""

    queue: str
    handler: str
    attempts: int


# Figures do not count snoozes, but these ran. An attempt that failed because its process died did
# not leave the time that it ran.
UNSUCCESSFUL = """
with part as (
    select f.queue, f.handler, f.failed, f.ran,
           sum(f.acked) over (partition by f.queue, f.handler) as acked
      from django_mq_minutefigures f
     where f.minute >= statement_timestamp() - make_interval(secs => %(since)s)
       and f.minute <= statement_timestamp()
)
select part.queue, part.handler,
       sum(greatest(part.failed,
                    (select coalesce(sum(ran.count::numeric), 0)
                       from jsonb_each_text(part.ran) as ran (bucket, count))))::bigint as attempts
  from part
 where part.acked = 0
 group by part.queue, part.handler
 order by attempts desc, part.queue, part.handler
"""


def unsuccessful(cursor: Cursor, *, since: float) -> list[Unsuccessful]:
    """Return the handlers without an ack in the last `since` seconds, most attempts first.

    `since` is at most an hour: older minutes may have been added up.
    """
    cursor.execute(UNSUCCESSFUL, {"since": since})
    return [Unsuccessful._make(row) for row in cursor.fetchall()]


FIRST_COUNTED = """
select date_part('epoch', min(f.minute))
  from django_mq_minutefigures f
 where f.minute >= to_timestamp(%(since)s::float8) and f.minute <= statement_timestamp()
"""


def first_counted(cursor: Cursor, *, since: float) -> float | None:
    """Return the first minute since a moment that has figures of any queue; None if none has.

    Both are in seconds since 1970.
    """
    cursor.execute(FIRST_COUNTED, {"since": since})
    first: float | None = cursor.fetchone()[0]
    return first


class Flow(NamedTuple):
    """The flow of a queue since the window began: messages that left it, and that came in."""

    queue: str
    outgoing: int
    incoming: int


FLOWS = """
select f.queue, (sum(f.acked) + sum(f.dead))::bigint, sum(f.broadcast)::bigint
  from django_mq_minutefigures f
 where f.minute >= to_timestamp(%(since)s::float8) and f.minute <= statement_timestamp()
   and (%(queues)s::text[] is null or f.queue = any(%(queues)s::text[]))
 group by f.queue
"""


def flows(cursor: Cursor, *, since: float, queues: Sequence[str] | None) -> list[Flow]:
    """Return the flow of each queue since a moment, in seconds since 1970."""
    cursor.execute(FLOWS, {"since": since, "queues": queues})
    return [Flow._make(row) for row in cursor.fetchall()]


#: The newest messages that are counted, and the newest ids among which they are looked for: after
#: a flood, dead index entries lie behind the newest messages.
NEWEST, NEWEST_IDS = 5_000, 200_000


class UncountedMessages(NamedTuple):
    """Messages that no figures count yet: of a queue, by the minute of their creation."""

    queue: str
    minute: int
    messages: int


class UncountedSnapshot(NamedTuple):
    """The time, and since when all uncounted messages are known (None: always).

    Both are in seconds since 1970.
    """

    now: float
    complete_since: float | None
    messages: list[UncountedMessages]


# Uncounted messages are those whose first attempt has not ended. A drawn id may stay unused, so the
# range of ids is only an upper bound. Without a right to the sequence, the largest id serves.
UNCOUNTED = """
with newest as materialized (
    select m.queue, m.created_at, m.attempts, m.leased_until, m.dead_at
      from django_mq_queuedmessage m
     where m.id > %(ids)s * -1 + coalesce(
               (select case when has_sequence_privilege(s.id, 'usage, select')
                            then pg_sequence_last_value(s.id) end
                  from (select pg_get_serial_sequence('django_mq_queuedmessage', 'id')::regclass)
                       as s (id)),
               (select max(id) from django_mq_queuedmessage), 0)
     order by m.id desc
     limit %(newest)s
)
select seen.now, seen.oldest, seen.count, found.queue, found.minute, found.count
  from (
    select extract(epoch from statement_timestamp())::float8 as now,
           extract(epoch from min(newest.created_at))::float8 as oldest, count(*) as count
      from newest
 ) seen
  left join (
    select newest.queue, count(*) as count,
           (floor(extract(epoch from newest.created_at) / 60) * 60)::bigint as minute
      from newest
     where newest.created_at > statement_timestamp() - interval '1 hour'
       and newest.created_at <= statement_timestamp()
       and newest.dead_at is null
       and (newest.attempts = 0 or (newest.attempts = 1 and newest.leased_until is not null))
       and (%(queues)s::text[] is null or newest.queue = any(%(queues)s::text[]))
     group by newest.queue, minute
 ) found on true
"""


def uncounted(cursor: Cursor, *, queues: Sequence[str] | None) -> UncountedSnapshot:
    """Return the messages of the last hour that no worker counts yet, out of the newest 5,000."""
    cursor.execute(UNCOUNTED, {"newest": NEWEST, "ids": NEWEST_IDS, "queues": queues})
    rows = cursor.fetchall()
    now, oldest, count, *_ = rows[0]
    found = [UncountedMessages(*row[3:]) for row in rows if row[3] is not None]
    return UncountedSnapshot(now, oldest if count >= NEWEST else None, found)
