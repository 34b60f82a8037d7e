"""Schedules of code: declare them, keep them declared, disable those that no code declares."""

from __future__ import annotations

import json
from collections.abc import Mapping

from django_mq.store import Cursor

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
 where name = any(%(names)s::text[]) and type = %(types)s::jsonb ->> name
   and declared_at < statement_timestamp() - make_interval(secs => %(touch_after)s)
   and declared_at >= statement_timestamp() - make_interval(secs => %(retire_after)s)
"""
DECLARED = """
select name
  from django_mq_schedule
 where name = any(%(names)s::text[])
   and declared_at >= statement_timestamp() - make_interval(secs => %(retire_after)s)
"""


def touch(
    cursor: Cursor, types: Mapping[str, str], *, touch_after: float, retire_after: float
) -> set[str]:
    """Record that schedules with these names and types are still declared; return those known.

    Others were never stored, were removed, or may have been retired: declare them. After
    `retire_after` seconds, this also covers a schedule whose type was changed by a version that no
    longer runs.
    """
    values = {
        "names": sorted(types),
        "types": json.dumps(dict(types)),
        "touch_after": touch_after,
        "retire_after": retire_after,
    }
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
