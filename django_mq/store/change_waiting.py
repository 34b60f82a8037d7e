"""Change messages that wait with a unique id, for a duplicate that was broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from django_mq.store import Cursor
from django_mq.store.unique_ids import ROW, UniqueRow, documents, holder_of

#: Rows per statement. The planner expects a hundred rows in a document and joins them by nested
#: loops: 20,000 duplicates in one statement took 17 s, in statements of 200 rows 2 to 3 s.
ROWS_PER_STATEMENT = 200

Row = TypeVar("Row")

# A locked row is skipped: another session claims, changes or replaces it. Attempts are never
# lowered, and at least one is left. A message that leaves its key is no longer blocked. An expired
# one may just have lost its id to a newer one: then it gets no more time. None is due in a quiet
# time. One that would expire before its stored due time, such as that of a retry, could never
# start: it gets the new due time.
REPLACE = f"""
with new as materialized (
    select row.*
      from jsonb_to_recordset(%(rows)s::jsonb) as row ({ROW}, sets_due boolean)
), waiting as materialized (
    select m.id, m.key
      from (select id from new order by id) new
     cross join lateral (
        select m.id, m.key
          from django_mq_queuedmessage m
         where m.id = new.id and m.leased_until is null and m.dead_at is null
           for no key update skip locked
     ) m
), holder as materialized (
    select u.id, u.message_id, new.unique_for
      from new join waiting using (id)
     cross join lateral (
        select u.id, u.message_id
          from django_mq_uniquekey u
         where u.queue = new.queue and u.handler = new.handler and u.type = new.type
           and u.unique_id = new.unique_id and u.put_aside is null and u.message_id = new.id
         limit 1
     ) u
), quiet as (
    update django_mq_uniquekey u
       set unique_for = make_interval(secs => holder.unique_for)
      from holder
     where u.id = any(array(select id from holder)) and u.id = holder.id
       and u.message_id = holder.message_id
    returning u.message_id, u.quiet_until
)
update django_mq_queuedmessage m
   set payload = new.payload, metadata = new.metadata, schema_version = new.schema_version,
       priority = new.priority, key = new.key, retry = new.retry, held_since = null,
       blocked_by = case when m.key is not distinct from new.key then m.blocked_by end,
       max_attempts = least(greatest(new.max_attempts, m.attempts + 1), 2147483646),
       unique_for = make_interval(secs => new.unique_for),
       expires_at = coalesce(new.expires,
                             statement_timestamp() + new.lifetime * interval '1 second'),
       processable_after = case
           when not new.sets_due and coalesce(
               new.expires, statement_timestamp() + new.lifetime * interval '1 second',
               'infinity') > m.processable_after then m.processable_after
           else greatest(
               coalesce(new.due, statement_timestamp() + new.delay * interval '1 second'),
               quiet.quiet_until) end
  from new join waiting using (id) join quiet on quiet.message_id = new.id
 where m.id = any(array(select id from waiting)) and m.id = new.id
returning m.id, m.queue, m.handler,
          case when waiting.key is distinct from new.key then waiting.key end
"""


class Replaced(NamedTuple):
    """A row with new content; `previous_key` is its previous key, if that changed."""

    id: int
    queue: str
    handler: str
    previous_key: str | None


def replace(cursor: Cursor, rows: Sequence[tuple[UniqueRow, bool]]) -> list[Replaced]:
    """Give waiting rows new content and options, and a new due time where the flag is set.

    Without it, a row also gets the new due time if it would expire before the stored one.

    Returns the rows that were still waiting, not locked, and had their ids.
    """
    replaced: list[Replaced] = []
    for part in _parts(sorted(rows, key=lambda pair: pair[0].id)):
        documents = [
            f'{unique.document()[:-1]},"sets_due":{"true" if sets_due else "false"}}}'
            for unique, sets_due in part
        ]
        cursor.execute(REPLACE, {"rows": f"[{','.join(documents)}]"})
        replaced += map(Replaced._make, cursor.fetchall())
    return replaced


# Changes the same rows as REPLACE, but only their due times. A message that would expire before its
# new due time could never start: it keeps the one that it has.
MOVE = f"""
with new as materialized (
    select row.*
      from jsonb_to_recordset(%(rows)s::jsonb) as row ({ROW})
), waiting as materialized (
    select m.id
      from (select id from new order by id) new
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = new.id and m.leased_until is null and m.dead_at is null
           for no key update skip locked
     ) m
), moved as (
    select new.id,
           greatest(coalesce(due, statement_timestamp() + delay * interval '1 second'),
                    u.quiet_until) as due
      from new
      left join {holder_of("new")} on u.message_id = new.id
)
update django_mq_queuedmessage m
   set processable_after = case
           when m.expires_at <= moved.due then m.processable_after else moved.due end
  from waiting join moved using (id)
 where m.id = any(array(select id from waiting)) and m.id = moved.id
returning m.id
"""


def move(cursor: Cursor, rows: Sequence[UniqueRow]) -> int:
    """Give waiting rows new due times; return how many still waited and were not locked."""
    moved = 0
    for part in _parts(sorted(rows, key=attrgetter("id"))):
        cursor.execute(MOVE, {"rows": documents(part)})
        moved += len(cursor.fetchall())
    return moved


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        yield rows[start : start + ROWS_PER_STATEMENT]
