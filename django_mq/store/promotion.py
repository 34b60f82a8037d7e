"""Content put aside for a unique id becomes a message once the id is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django_mq.policy import column_bounds as bounds
from django_mq.store import Cursor, notify
from django_mq.store.unique_ids import IS_FREE, UniqueId, columns, holder_of, if_as_seen

# A separate check: content is seldom put aside, and PROMOTE_PUT_ASIDE takes the server a while to
# plan.
FIND_PUT_ASIDE = """
select a.queue, a.handler, a.type, a.unique_id
  from unnest(%(queues)s::text[], %(handlers)s::text[], %(types)s::text[], %(unique_ids)s::text[])
       as wanted (queue, handler, type, unique_id)
 cross join lateral (
    select a.queue, a.handler, a.type, a.unique_id
      from django_mq_uniquekey a
     where a.queue = wanted.queue and a.handler = wanted.handler and a.type = wanted.type
       and a.unique_id = wanted.unique_id and a.put_aside is not null
     limit 1
 ) a
"""


def find_put_aside(cursor: Cursor, ids: Mapping[str, object]) -> list[UniqueId]:
    """Return those of `ids`, as `columns()` gives them, for which content is put aside."""
    cursor.execute(FIND_PUT_ASIDE, ids)
    return [UniqueId._make(row) for row in cursor.fetchall()]


#: The first and the last time that a message may have, in seconds since 1970.
TIME_RANGE = (int(bounds.FIRST_TIME.timestamp()), int(bounds.LAST_TIME.timestamp()))


def _number(name: str, low: int, high: int, *, default: str = "null") -> str:
    return f"""case jsonb_typeof(a.{name}) when 'number'
               then least(greatest((a.{name})::numeric, {low}), {high}) else {default} end"""


# Content put aside becomes a message once no live message holds its id, due after the quiet time if
# one has begun. Its row is locked first, so it is promoted only once. Other clients may have
# written any object there: missing or mistyped fields get their defaults, numbers are clamped.
PROMOTE_PUT_ASIDE = f"""
with aside as materialized (
    select a.*, found.seen_id, found.seen_until, found.seen_version
      from (
        select found.id, u.message_id as seen_id, u.quiet_until as seen_until,
               u.version as seen_version
          from unnest(%(queues)s::text[], %(handlers)s::text[], %(types)s::text[],
                      %(unique_ids)s::text[]) as wanted (queue, handler, type, unique_id)
         cross join lateral (
            select a.id
              from django_mq_uniquekey a
             where a.queue = wanted.queue and a.handler = wanted.handler and a.type = wanted.type
               and a.unique_id = wanted.unique_id and a.put_aside is not null
             limit 1
         ) found
          left join {holder_of("wanted")} on true
         where {IS_FREE}
        offset 0
     ) found
     cross join lateral (
        select a.id, a.queue, a.handler, a.type, a.unique_id, a.put_aside
          from django_mq_uniquekey a
         where a.id = found.id
           for update skip locked
     ) a
), next as materialized (
    select aside.*, row.*, nextval(sequence.name) as message_id
      from (select pg_get_serial_sequence('django_mq_queuedmessage', 'id')::regclass as name)
           as sequence
     cross join aside
     cross join lateral (
        select coalesce(a.payload, '{{}}') as payload,
               {_number("max_attempts", 0, 2147483646, default="20")} as max_attempts,
               {_number("schema_version", 1, bounds.MAX_INTEGER, default="1")} as schema_version,
               case jsonb_typeof(a.metadata) when 'object' then a.metadata else '{{}}' end
                   as metadata,
               {_number("priority", bounds.MIN_PRIORITY, bounds.MAX_PRIORITY, default="0")}
                   as priority,
               case when jsonb_typeof(a.key) = 'string' and a.key #>> '{{}}' ~ '{bounds.KEY}'
                     and length(a.key #>> '{{}}') <= {bounds.MAX_NAME}
                    then a.key #>> '{{}}' end as key,
               a.retry,
               a.wants_result is not distinct from 'true' as wants_result,
               a.ordered is not distinct from 'true' as ordered,
               to_timestamp({_number("due", *TIME_RANGE)}::float8) as due,
               to_timestamp({_number("expires", *TIME_RANGE)}::float8) as expires,
               make_interval(secs => {_number("unique_for", 0, 3155760000)}::float8) as unique_for
          from jsonb_to_record(aside.put_aside) as a (
               payload jsonb, max_attempts jsonb, schema_version jsonb, metadata jsonb,
               priority jsonb, key jsonb, retry jsonb, wants_result jsonb, ordered jsonb,
               due jsonb, expires jsonb, unique_for jsonb)
     ) row
), taken as (
    insert into django_mq_uniquekey as u (queue, handler, type, unique_id, message_id, unique_for)
    select queue, handler, type, unique_id, message_id, unique_for
      from next
     order by queue, handler, type, unique_id
        {if_as_seen("next", "message_id")}
), written as materialized (
    select next.*, message_id in (select message_id from taken) as is_taken
      from next
), removed as (
    delete from django_mq_uniquekey
     where id = any(array(select id from written where is_taken))
), added as (
    insert into django_mq_queuedmessage (
        id, queue, type, payload, max_attempts, handler, schema_version, metadata, priority, key,
        retry, wants_result, ordered, unique_id, unique_for, processable_after, expires_at
    )
    select
        message_id, queue, type, payload, max_attempts, handler, schema_version, metadata,
        priority, key, retry, wants_result, ordered, unique_id, unique_for,
        greatest(due, seen_until, statement_timestamp()), expires
      from written
     where is_taken
    returning id
)
select id,
       case when %(ring)s and (select {notify.HAS_ROOM})
            then pg_notify('{notify.CHANNEL}', '') end
  from added
"""


def promote_put_aside(cursor: Cursor, ids: Sequence[UniqueId]) -> list[int]:
    """Turn content put aside for these ids into messages where the id is free; return their ids.

    Waits for open transactions that have taken such an id.
    """
    cursor.execute(PROMOTE_PUT_ASIDE, {**columns(ids), "ring": notify.is_enabled()})
    return [row[0] for row in cursor.fetchall()]


def _locked(condition: str) -> str:
    """Return a query that locks the rows of `columns()` with this condition, in column order."""
    return f"""
select u.id
  from (
    select *
      from unnest(%(queues)s::text[], %(handlers)s::text[], %(types)s::text[],
                  %(unique_ids)s::text[]) as wanted (queue, handler, type, unique_id)
     order by queue collate "C", handler collate "C", type collate "C", unique_id collate "C"
  ) wanted
 cross join lateral (
    select u.id
      from django_mq_uniquekey u
     where u.queue = wanted.queue and u.handler = wanted.handler and u.type = wanted.type
       and u.unique_id = wanted.unique_id and u.{condition}
       for update
  ) u
"""


# The content comes first, as in PROMOTE_PUT_ASIDE, so the two do not deadlock. A transaction that
# puts content aside may stay open for long: whoever waits for it must not hold the row of an id,
# for which workers wait when they end a message.
LOCK = f"""{_locked("put_aside is not null")} union all {_locked("put_aside is null")}"""


def lock(cursor: Cursor, ids: Sequence[UniqueId]) -> None:
    """Wait for transactions that end the messages of these ids, or promote those put aside."""
    cursor.execute(LOCK, columns(ids))
