"""Read the state of a queue in one statement; pause, resume and limit it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.store import Cursor

# One probe per priority, so that neither a million due nor a million delayed rows are scanned.
# FOR SHARE skips a row that a claim or a handler has locked, which therefore does not count as due;
# two readers do not hide it from each other. A row behind another of its key is not due either: the
# subquery for the head of a key is memoized, one probe per key.
STATE = """
with recursive lane (priority) as (
    (select m.priority
       from django_mq_queuedmessage m
      where m.queue = %(queue)s
        and m.leased_until is null and m.blocked_by is null and m.dead_at is null
      order by m.priority desc
      limit 1)
    union all
    select following.priority
      from lane
     cross join lateral (
        select m.priority
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.priority < lane.priority
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
         order by m.priority desc
         limit 1
     ) following
), due as materialized (
    select found.id
      from lane
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
          left join lateral (
            select earlier.id
              from django_mq_queuedmessage earlier
             where earlier.queue = m.queue and earlier.handler = m.handler
               and earlier.key = m.key
               and (earlier.dead_at is null or not %(skip_dead)s)
             order by earlier.id
             limit 1
          ) head on true
         where m.queue = %(queue)s and m.priority = lane.priority
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
           and m.processable_after <= statement_timestamp()
           and (m.expires_at is null or m.expires_at > statement_timestamp())
           and (m.key is null or m.id = head.id)
         order by m.processable_after, m.id
         limit 1
           for share of m skip locked
     ) found
     limit 1
), lapsed as materialized (
    select m.id
      from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.leased_until <= statement_timestamp()
     order by m.leased_until, m.id
     limit 1
       for share of m skip locked
), next as (
    select min(soonest.at) as at
      from lane
     cross join lateral (
        select m.processable_after as at
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.priority = lane.priority
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
           and m.processable_after > statement_timestamp()
         order by m.processable_after
         limit 1
     ) soonest
), lapse as (
    select m.leased_until as at
      from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.leased_until > statement_timestamp()
     order by m.leased_until
     limit 1
), taken as (
    select exists (
        select
          from lane
         cross join lateral (
            select
              from django_mq_queuedmessage m
             where m.queue = %(queue)s and m.priority = lane.priority
               and m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and m.processable_after <= statement_timestamp()
               and (m.expires_at is null or m.expires_at > statement_timestamp())
             limit 1
         ) found
    ) or exists (
        select
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.leased_until <= statement_timestamp()
    ) as found
)
select exists (select from due) or exists (select from lapsed),
       least(next.at, lapse.at),
       taken.found,
       statement_timestamp(),
       coalesce(s.paused_at is not null
                and (s.paused_until is null or s.paused_until > statement_timestamp()), false),
       coalesce(s.backoff_level, 0),
       case when s.backoff_until > statement_timestamp() then s.backoff_until end
  from next
 cross join taken
  left join lapse on true
  left join django_mq_queuestate s on s.queue = %(queue)s
"""


class QueueSnapshot(NamedTuple):
    """The state of a queue at `now`, by the database's clock.

    `due`: a message can be claimed. `next_at`: the earliest due or lapse time in the future.
    `taken`: a message is due or lapsed, though another session may have it locked.
    """

    due: bool
    next_at: datetime | None
    taken: bool
    now: datetime
    paused: bool
    backoff_level: int
    backoff_until: datetime | None


def state(cursor: Cursor, *, queue: str, skip_dead: bool) -> QueueSnapshot:
    """Return the state of `queue`; with `skip_dead`, a dead head does not block its key.

    Locks at most two rows until the transaction ends: roll back to a savepoint.
    """
    cursor.execute(STATE, {"queue": queue, "skip_dead": skip_dead})
    return QueueSnapshot._make(cursor.fetchone())


PAUSE = """
insert into django_mq_queuestate as s (queue, paused_at, paused_until)
select %(queue)s, statement_timestamp(), pause.until
  from (
    select coalesce(%(at)s::timestamptz,
                    statement_timestamp() + make_interval(secs => %(delay)s::float8)) as until
  ) pause
 where (pause.until <= statement_timestamp()) is not true
    on conflict (queue) do update
   set paused_at = excluded.paused_at, paused_until = excluded.paused_until
returning s.paused_until
"""


class Paused(NamedTuple):
    """A queue is paused `until` then, or (None) until it is resumed."""

    until: datetime | None


def pause(cursor: Cursor, *, queue: str, at: datetime | None, delay: float | None) -> Paused | None:
    """Pause `queue` until `at`, or for `delay` seconds, or (both None) until it is resumed.

    Changes nothing and returns None if that time is past.
    """
    cursor.execute(PAUSE, {"queue": queue, "at": at, "delay": delay})
    row = cursor.fetchone()
    return None if row is None else Paused(row[0])


RESUME = """
update django_mq_queuestate
   set paused_at = null, paused_until = null
 where queue = %(queue)s and paused_at is not null
returning queue
"""


def resume(cursor: Cursor, *, queue: str) -> bool:
    """End the pause of `queue`; return whether it was paused."""
    cursor.execute(RESUME, {"queue": queue})
    return cursor.fetchone() is not None


LIMIT = """
insert into django_mq_queuestate as s (queue, max_in_flight)
select %(queue)s::text, %(max_in_flight)s::int
 where %(max_in_flight)s::int is not null
    or exists (select from django_mq_queuestate s where s.queue = %(queue)s::text)
    on conflict (queue) do update
   set max_in_flight = excluded.max_in_flight
"""


def limit(cursor: Cursor, *, queue: str, max_in_flight: int | None) -> None:
    """Limit the messages of `queue` in flight; None restores the limit of the settings."""
    cursor.execute(LIMIT, {"queue": queue, "max_in_flight": max_in_flight})
