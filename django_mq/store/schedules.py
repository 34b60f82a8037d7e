"""Schedules: take those that are due, move them to their next time, enable and disable them.

A schedule is off while its `next_at` is null, and only then is it missing from the index that the
workers read. Callers compute times from `now()` here, which is the database's clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django_mq.policy.due_times import CatchUp, Overlap
from django_mq.store import Cursor

#: The types of the schedules that a process declares, by name.
Own = Mapping[str, str]

# A process leaves out the schedules of other code. `own` has the type of each schedule that it
# declares, by name.
_OF_THIS_CODE = "(s.source <> 'code' or %(own)s::jsonb ->> s.name = s.type)"


def _next_due(condition: str) -> str:
    return f"""
select extract(epoch from s.next_at - statement_timestamp())::float8
  from django_mq_schedule s
 where s.next_at is not null and (%(cron)s or s.cron = '')
   and {condition}
 order by s.next_at
 limit 1
"""


# One probe of the index, however many schedules there are; a monitor may read no other columns.
NEXT_DUE = _next_due("true")
# It also passes over the due schedules of other code.
NEXT_OWN_DUE = _next_due(_OF_THIS_CODE)


def next_due(cursor: Cursor, *, cron: bool = True, own: Own | None = None) -> float | None:
    """Return the seconds until a schedule is due, below zero if one is; None if all are off.

    `cron=False` leaves out cron expressions, for a process that cannot read them. `own` leaves out
    schedules of code, except those with one of these names and its type.
    """
    if own is None:
        cursor.execute(NEXT_DUE, {"cron": cron})
    else:
        cursor.execute(NEXT_OWN_DUE, {"cron": cron, "own": json.dumps(own)})
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
   and (%(own)s::jsonb is null or {_OF_THIS_CODE})
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
    own: Own | None = None,
    until: datetime | None = None,
) -> list[ScheduleRow]:
    """Lock the next schedules that are due, in order, except those that other sessions have locked.

    They follow the position `after`. `cron` and `own` leave out schedules as in `next_due()`.
    `limit=None` locks all. With `until`, locks those that are due by that time instead of by now.
    """
    at, name = after
    cursor.execute(
        TAKE_DUE,
        {
            "until": until,
            "after_at": at,
            "after_name": name,
            "cron": cron,
            "own": None if own is None else json.dumps(own),
            "limit": limit,
        },
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
