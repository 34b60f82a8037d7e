"""Pause, resume and limit a queue."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor

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
    """The pause of a queue: `until` a time, or (None) until it is resumed."""

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
   and (paused_until is null or paused_until > statement_timestamp())
returning queue
"""


def resume(cursor: Cursor, *, queue: str) -> bool:
    """End the pause of `queue`; return whether it was paused, and its time had not passed."""
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
