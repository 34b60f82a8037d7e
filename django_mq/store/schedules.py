"""Schedules: declare them, take those that are due, move them to their next time.

A schedule is off while its `next_at` is null, and only then is it missing from the index that the
workers read. Callers compute times from `now()` here, which is the database's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django_mq.policy.due_times import CatchUp, Overlap
from django_mq.store import Cursor

# One probe of the index, however many schedules there are.
NEXT_DUE = """
select extract(epoch from s.next_at - statement_timestamp())::float8
  from django_mq_schedule s
 where s.next_at is not null and (%(cron)s or s.cron = '')
 order by s.next_at
 limit 1
"""


def next_due(cursor: Cursor, *, cron: bool = True) -> float | None:
    """Return the seconds until a schedule is due, below zero if one is; None if all are off.

    `cron=False` leaves out cron expressions, for a process that cannot read them.
    """
    cursor.execute(NEXT_DUE, {"cron": cron})
    row = cursor.fetchone()
    return None if row is None else row[0]


NOW = "select extract(epoch from statement_timestamp())::float8"


def now(cursor: Cursor) -> datetime:
    """Return the time by the database's clock, in UTC."""
    cursor.execute(NOW)
    return _moment(cursor.fetchone()[0])


class ScheduleRow(NamedTuple):
    """One schedule; `now` is when it was read, by the database's clock."""

    name: str
    type: str
    payload: str
    metadata: str
    cron: str
    every: timedelta | None
    tz: str
    queue: str
    catch_up: CatchUp
    overlap: Overlap
    expires: timedelta | None
    enabled: bool
    next_at: datetime | None
    last_error: str
    now: datetime

    @property
    def due_at(self) -> datetime:
        """The time for which the schedule is due; now if it is off."""
        return self.next_at or self.now


# Numbers instead of times and intervals, which Django converts depending on USE_TZ.
_COLUMNS = """s.name, s.type, s.payload::text, s.metadata::text, s.cron,
       extract(epoch from s.every)::float8, s.tz, s.queue, s.catch_up, s.overlap,
       extract(epoch from s.expires)::float8, s.enabled,
       extract(epoch from s.next_at)::float8, s.last_error,
       extract(epoch from statement_timestamp())::float8"""

TAKE_DUE = f"""
select {_COLUMNS}
  from django_mq_schedule s
 where s.next_at <= coalesce(%(until)s::timestamptz, statement_timestamp())
   and (s.next_at, s.name) > (%(after_at)s::timestamptz, %(after_name)s::text)
   and (%(cron)s or s.cron = '')
 order by s.next_at, s.name
 limit %(limit)s::bigint
   for no key update skip locked
"""

#: A position in the order of schedules: next time and name. Then, the position before all.
Position = tuple[datetime, str]
FIRST: Position = (datetime(1, 1, 1, tzinfo=UTC), "")


def take_due(
    cursor: Cursor,
    *,
    limit: int | None,
    after: Position = FIRST,
    cron: bool = True,
    until: datetime | None = None,
) -> list[ScheduleRow]:
    """Lock the next schedules that are due, in order, except those that other sessions have locked.

    They follow the position `after`. `cron=False` leaves out cron expressions, for a process that
    cannot read them. `limit=None` locks all. With `until`, locks those that are due by that time
    instead of by now.
    """
    at, name = after
    cursor.execute(
        TAKE_DUE,
        {"until": until, "after_at": at, "after_name": name, "cron": cron, "limit": limit},
    )
    return [_row(row) for row in cursor.fetchall()]


READ = f"select {_COLUMNS} from django_mq_schedule s where s.name = %(name)s"


def read(cursor: Cursor, name: str) -> ScheduleRow | None:
    """Return one schedule without locking it; None if there is none."""
    cursor.execute(READ, {"name": name})
    row = cursor.fetchone()
    return None if row is None else _row(row)


NAMES = "select name from django_mq_schedule"


def names(cursor: Cursor) -> list[str]:
    """Return the names of all schedules."""
    cursor.execute(NAMES)
    return [name for (name,) in cursor.fetchall()]


TAKE = f"{READ} for no key update"


def take(cursor: Cursor, name: str) -> ScheduleRow | None:
    """Lock one schedule, waiting for other sessions; return None if there is none."""
    cursor.execute(TAKE, {"name": name})
    row = cursor.fetchone()
    return None if row is None else _row(row)


# Nothing is written for a schedule that does not change, such as a due one whose queue is full.
MOVE = """
update django_mq_schedule
   set next_at = %(next_at)s::timestamptz,
       last_at = coalesce(%(last_at)s::timestamptz, last_at),
       last_message = coalesce(%(last_message)s::bigint, last_message),
       last_error = %(last_error)s::text
 where name = %(name)s
   and (%(last_at)s::timestamptz is not null
        or (next_at, last_error) is distinct from
           (%(next_at)s::timestamptz, %(last_error)s::text))
"""


def move(
    cursor: Cursor,
    name: str,
    *,
    next_at: datetime | None,
    last_at: datetime | None = None,
    last_message: int | None = None,
    last_error: str = "",
) -> None:
    """Set the next time of a schedule, and the facts about the last one (None keeps them)."""
    cursor.execute(
        MOVE,
        {
            "name": name,
            "next_at": next_at,
            "last_at": last_at,
            "last_message": last_message,
            "last_error": last_error,
        },
    )


# The operator's decision wins; the next time changes only with the columns it is computed from.
# Declaring an unchanged schedule writes nothing for `touch_after` seconds after `declared_at`,
# which is null for one that no code has declared.
DECLARE = """
insert into django_mq_schedule as s (
    name, type, payload, metadata, cron, every, tz, queue, catch_up, overlap, expires,
    source, enabled, next_at, declared_at)
values (
    %(name)s, %(type)s, %(payload)s::jsonb, %(metadata)s::jsonb, %(cron)s,
    make_interval(secs => %(every)s::float8), %(tz)s, %(queue)s, %(catch_up)s, %(overlap)s,
    make_interval(secs => %(expires)s::float8), 'code', %(enabled)s,
    case when %(enabled)s then %(next_at)s::timestamptz end, statement_timestamp())
    on conflict (name) do update
   set type = excluded.type, payload = excluded.payload, metadata = excluded.metadata,
       cron = excluded.cron, every = excluded.every, tz = excluded.tz, queue = excluded.queue,
       catch_up = excluded.catch_up, overlap = excluded.overlap, expires = excluded.expires,
       source = 'code', enabled = coalesce(s.decision, excluded.enabled),
       next_at = case
           when not coalesce(s.decision, excluded.enabled) then null
           when s.next_at is null
             or (s.cron, s.every, s.tz)
                is distinct from (excluded.cron, excluded.every, excluded.tz)
           then %(next_at)s::timestamptz
           else s.next_at end,
       declared_at = statement_timestamp()
 where s.declared_at is null
    or s.declared_at < statement_timestamp() - make_interval(secs => %(touch_after)s)
    or (s.type, s.payload, s.metadata, s.cron, s.every, s.tz, s.queue, s.catch_up, s.overlap,
        s.expires, s.enabled)
       is distinct from
       (excluded.type, excluded.payload, excluded.metadata, excluded.cron, excluded.every,
        excluded.tz, excluded.queue, excluded.catch_up, excluded.overlap, excluded.expires,
        coalesce(s.decision, excluded.enabled))
"""


def declare(cursor: Cursor, *, touch_after: float, **columns: object) -> None:
    """Store a schedule as the code declares it; `every` and `expires` are seconds."""
    cursor.execute(DECLARE, {"touch_after": touch_after, **columns})


TOUCH = """
update django_mq_schedule
   set declared_at = statement_timestamp()
 where name = any(%(names)s::text[])
   and declared_at < statement_timestamp() - make_interval(secs => %(touch_after)s)
   and declared_at >= statement_timestamp() - make_interval(secs => %(retire_after)s)
"""
DECLARED = """
select name
  from django_mq_schedule
 where name = any(%(names)s::text[])
   and declared_at >= statement_timestamp() - make_interval(secs => %(retire_after)s)
"""


def touch(cursor: Cursor, names: list[str], *, touch_after: float, retire_after: float) -> set[str]:
    """Record that these schedules are still declared; return the names that are known.

    Others were never stored, were removed, or may have been retired: declare them.
    """
    values = {"names": names, "touch_after": touch_after, "retire_after": retire_after}
    cursor.execute(TOUCH, values)
    cursor.execute(DECLARED, values)
    return {name for (name,) in cursor.fetchall()}


RETIRE = """
update django_mq_schedule
   set enabled = false, next_at = null
 where name = any(array(
    select s.name
      from django_mq_schedule s
     where s.source = 'code' and s.enabled
       and s.declared_at < statement_timestamp() - make_interval(secs => %(retire_after)s)
     order by s.name
       for no key update skip locked))
returning name
"""


def retire(cursor: Cursor, *, retire_after: float) -> list[str]:
    """Disable schedules of code that no process has declared for `retire_after` seconds."""
    cursor.execute(RETIRE, {"retire_after": retire_after})
    return [name for (name,) in cursor.fetchall()]


# If an operator enables a schedule that the code dropped, processes get time to declare it again;
# `declared_at` stays null for a schedule that no code has declared.
DECIDE = """
update django_mq_schedule
   set decision = %(enabled)s, enabled = %(enabled)s, next_at = %(next_at)s::timestamptz,
       declared_at = case when source = 'code' then statement_timestamp() end
 where name = %(name)s
"""


def decide(cursor: Cursor, name: str, *, enabled: bool, next_at: datetime | None) -> None:
    """Store an operator's decision, with the next time if the schedule is enabled."""
    cursor.execute(DECIDE, {"name": name, "enabled": enabled, "next_at": next_at})


def _row(row: Sequence[Any]) -> ScheduleRow:
    found: Mapping[str, Any] = dict(zip(ScheduleRow._fields, row, strict=True))
    return ScheduleRow(
        **{
            **found,
            "every": _span(found["every"]),
            "expires": _span(found["expires"]),
            "next_at": None if found["next_at"] is None else _moment(found["next_at"]),
            "now": _moment(found["now"]),
        }
    )


def _span(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _moment(seconds: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
