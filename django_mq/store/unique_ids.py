"""Unique ids: how producers look them up and take them.

A row here takes an id; the message that holds it may end at any time. No statement waits for a lock
on a message, whose session may wait for an id. Sessions lock ids in column order, by bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django_mq.store import Cursor, texts
from django_mq.store.insert import as_json
from django_mq.store.rows import NewRow


class UniqueId(NamedTuple):
    """A unique id and its scope: queue, handler and type."""

    queue: str
    handler: str
    type: str
    unique_id: str


#: The parameters of `columns()`, in the order of the fields of a UniqueId.
NAMES = ("queues", "handlers", "types", "unique_ids")


def columns(ids: Iterable[UniqueId]) -> dict[str, object]:
    """Return ids as the parameters `NAMES`: array literals, since lists take the driver 5 us."""
    found = tuple(zip(*ids, strict=True)) or ((), (), (), ())
    return dict(zip(NAMES, map(texts, found), strict=True))


#: The end of the quiet time of the id `u`; null once it is over.
IF_QUIET = "case when u.quiet_until > statement_timestamp() then u.quiet_until end"


def holder_of(id: str) -> str:
    """Return the FROM item `u`: the last holder of the unique id of the row `id`.

    Its `version` differs after each change of the row.
    """
    return f"""lateral (
    select u.message_id, u.quiet_until, u.xmin::text as version
      from django_mq_uniquekey u
     where u.queue = {id}.queue and u.handler = {id}.handler and u.type = {id}.type
       and u.unique_id = {id}.unique_id and u.put_aside is null
     limit 1
  ) u"""


def if_as_seen(rows: str, id: str) -> str:
    """Return the end of an INSERT that takes the unique ids of `rows` that are still as seen.

    The version reveals a transaction that gave more time to a message that had expired. A quiet
    time that is not over stays beside the message.
    """
    # IN, without nulls, is looked up in a hash table. EXISTS would compare each id that has a row
    # with all `rows`: taking 8,000 ids whose quiet time is over took 3 to 12 s instead of 0.2.
    return f"""on conflict (queue, handler, type, unique_id) where put_aside is null do update
       set message_id = excluded.message_id, unique_for = excluded.unique_for,
           quiet_until = {IF_QUIET}
     where (excluded.message_id, coalesce(u.message_id, 0), coalesce(u.quiet_until, '-infinity'),
            u.xmin::text)
           in (select {rows}.{id}, coalesce({rows}.seen_id, 0),
                      coalesce({rows}.seen_until, '-infinity'), coalesce({rows}.seen_version, '')
                 from {rows})
    returning u.message_id"""


#: Message `m` holds its unique id. One that expired while it waited does not: it can never start,
#: and the chore that dead-letters it may be long in coming. Where one snapshot serves the whole
#: transaction, it must have expired before that: later, a worker may have claimed it in time,
#: unseen.
HOLDS = """m.dead_at is null
       and (m.leased_until is not null or (m.expires_at <=
            case current_setting('transaction_isolation') when 'read committed'
            then statement_timestamp() else transaction_timestamp() end) is not true)"""

#: No live message holds the unique id of `holder_of()`. A scalar subquery: see `store/__init__.py`.
IS_FREE = f"""(select m.id
             from django_mq_queuedmessage m
            where m.id = u.message_id and {HOLDS}) is null"""

# quiet_until is text and is returned unchanged: its Python value would depend on USE_TZ.
READ_STATES = f"""
select u.message_id, u.quiet_until::text, m.id is not null, m.leased_until is not null,
       coalesce(u.quiet_until > statement_timestamp(), false), aside.id is not null, u.version
  from unnest(%(queues)s::text[], %(handlers)s::text[], %(types)s::text[], %(unique_ids)s::text[])
       with ordinality as wanted (queue, handler, type, unique_id, ordinal)
  left join {holder_of("wanted")} on true
  left join lateral (
    select m.id, m.leased_until
      from django_mq_queuedmessage m
     where m.id = u.message_id and {HOLDS}
     limit 1
  ) m on true
  left join lateral (
    select a.id
      from django_mq_uniquekey a
     where a.queue = wanted.queue and a.handler = wanted.handler and a.type = wanted.type
       and a.unique_id = wanted.unique_id and a.put_aside is not null
     limit 1
  ) aside on true
 order by wanted.ordinal
"""


class StoredUniqueId(NamedTuple):
    """The state of a unique id; `message_id` and `quiet_until` as stored, current or not.

    `alive`: that message exists and holds the id; `leased`: a worker has it; `quiet`: the quiet
    time is not over; `aside`: content is put aside; `version`: of the id's row.
    """

    message_id: int | None
    quiet_until: str | None
    alive: bool
    leased: bool
    quiet: bool
    aside: bool
    version: str | None


def read_states(cursor: Cursor, ids: Sequence[UniqueId]) -> list[StoredUniqueId]:
    """Return the state of each id, without waiting for locks."""
    cursor.execute(READ_STATES, columns(ids))
    return [StoredUniqueId._make(row) for row in cursor.fetchall()]


class UniqueRow(NamedTuple):
    """A row to write, its id, and the state in which its unique id was seen, if it has one.

    `unique_for` is how many seconds the unique id stays taken after a success.
    """

    id: int
    row: NewRow
    unique_id: str | None = None
    unique_for: float | None = None
    seen: StoredUniqueId | None = None

    def document(self) -> str:
        """Return the row as a JSON object."""
        seen = self.seen
        return as_json(
            self.row,
            id=self.id,
            unique_id=self.unique_id,
            unique_for=self.unique_for,
            seen_id=seen and seen.message_id,
            seen_until=seen and seen.quiet_until,
            seen_version=seen and seen.version,
        )


#: The columns of a document, without those of its unique id as it was seen.
ROW = """id bigint, queue text, type text, payload jsonb, max_attempts integer,
        handler text, schema_version integer, metadata jsonb, priority smallint, key text,
        retry jsonb, wants_result boolean, ordered boolean, due timestamptz, delay float8,
        expires timestamptz, lifetime float8, unique_id text, unique_for float8"""

# An id is taken only if its row is as it was seen. The row is locked, then compared in its current
# version; the message that it names would be seen only as it was when the statement began.
ADD = f"""
with new as materialized (
    select row.*
      from jsonb_to_recordset(%(rows)s::jsonb) as row (
        {ROW}, seen_id bigint, seen_until timestamptz, seen_version text)
), taken as (
    insert into django_mq_uniquekey as u (queue, handler, type, unique_id, message_id, unique_for)
    select queue, handler, type, unique_id, id, make_interval(secs => unique_for)
      from new
     where unique_id is not null
     order by queue collate "C", handler collate "C", type collate "C", unique_id collate "C"
        {if_as_seen("new", "id")}
)
insert into django_mq_queuedmessage (
    id, queue, type, payload, max_attempts, handler, schema_version, metadata, priority, key,
    retry, wants_result, ordered, unique_id, unique_for, processable_after, expires_at
)
select
    id, queue, type, payload, max_attempts, handler, schema_version, metadata, priority, key,
    retry, wants_result, ordered, unique_id, make_interval(secs => unique_for),
    greatest(coalesce(due, statement_timestamp() + delay * interval '1 second'), seen_until),
    coalesce(expires, statement_timestamp() + lifetime * interval '1 second')
  from new
 where unique_id is null or id in (select message_id from taken)
returning id, date_part('epoch', statement_timestamp())
"""


def add(cursor: Cursor, rows: Sequence[UniqueRow]) -> dict[int, float]:
    """Insert the rows whose unique ids are still as they were seen.

    Returns the `created_at` of the inserted rows, in seconds since 1970, by id.

    Takes the unique ids in sorted order, and waits for open transactions that have taken one of
    them. A message broadcast in a quiet time is due after it.
    """
    cursor.execute(ADD, {"rows": documents(rows)})
    return dict(cursor.fetchall())


def documents(rows: Sequence[UniqueRow]) -> str:
    """Return the rows as a JSON array."""
    return f"[{','.join(row.document() for row in rows)}]"
