"""Put content aside for a unique id; find what was left there, by scans in pieces; drop it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.unique_ids import IS_FREE, UniqueId, UniqueRow, documents, holder_of

# Delays count from the broadcast, so they become times here, stored in seconds since 1970: a CHECK
# can verify a number, but not a date. The last content put aside for an id replaces any earlier.
PUT_ASIDE = """
insert into django_mq_uniquekey (queue, handler, type, unique_id, put_aside)
select row->>'queue', row->>'handler', row->>'type', row->>'unique_id',
       row - array['id', 'delay', 'lifetime', 'seen_id', 'seen_until', 'seen_version']
           || jsonb_build_object(
           'due', extract(epoch from coalesce(
               (row->>'due')::timestamptz,
               statement_timestamp() + (row->>'delay')::float8 * interval '1 second')),
           'expires', extract(epoch from coalesce(
               (row->>'expires')::timestamptz,
               statement_timestamp() + (row->>'lifetime')::float8 * interval '1 second')))
  from jsonb_array_elements(%(rows)s::jsonb) as new (row)
 order by (row->>'queue') collate "C", (row->>'handler') collate "C", (row->>'type') collate "C",
       (row->>'unique_id') collate "C"
    on conflict (queue, handler, type, unique_id) where put_aside is not null do update
   set put_aside = excluded.put_aside
"""


def put_aside(cursor: Cursor, rows: Sequence[UniqueRow]) -> None:
    """Keep the rows until their unique ids are free; wait for sessions that put aside the same."""
    cursor.execute(PUT_ASIDE, {"rows": documents(rows)})


FREE_PUT_ASIDE = f"""
with walked as materialized (
    select a.queue, a.handler, a.type, a.unique_id
      from django_mq_uniquekey a
     where a.put_aside is not null
       and (a.unique_id, a.type, a.queue, a.handler)
           > (%(unique_id)s::text, %(type)s::text, %(queue)s::text, %(handler)s::text)
     order by a.unique_id, a.type, a.queue, a.handler
     limit %(limit)s
)
select a.queue, a.handler, a.type, a.unique_id, {IS_FREE}
  from walked a
  left join {holder_of("a")} on true
 order by a.unique_id, a.type, a.queue, a.handler
"""


class PutAsideIds(NamedTuple):
    """The free ids with content put aside; `resume` is the last id looked at, None at the end."""

    ids: list[UniqueId]
    resume: UniqueId | None


def free_put_aside(cursor: Cursor, *, limit: int, after: UniqueId | None = None) -> PutAsideIds:
    """Return ids that no live message holds, though content is put aside for them.

    The content was put aside while the message ended, or the message was deleted by hand.
    Looks at up to `limit` ids with content put aside, those after `after`.
    """
    begin = after or UniqueId("", "", "", "")
    cursor.execute(FREE_PUT_ASIDE, {**begin._asdict(), "limit": limit})
    found = [(UniqueId._make(row[:4]), row[4]) for row in cursor.fetchall()]
    resume = found[-1][0] if len(found) >= limit else None
    return PutAsideIds([id for id, free in found if free], resume)


DROP_ASIDE = """
delete from django_mq_uniquekey
 where id = any(array(
    select id from django_mq_uniquekey
     where put_aside is not null
       and (%(type)s::text is null or type = %(type)s)
       and (%(unique_id)s::text is null or unique_id = %(unique_id)s)
       for update skip locked))
returning id
"""


def drop_aside(cursor: Cursor, *, type: str | None, unique_id: str | None) -> int:
    """Delete content put aside that matches every argument that is not None; return how many."""
    cursor.execute(DROP_ASIDE, {"type": type, "unique_id": unique_id})
    return len(cursor.fetchall())
