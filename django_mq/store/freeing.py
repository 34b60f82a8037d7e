"""Unique ids when their messages end: free again, quiet, or of what was put aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.store.unique import UniqueId, columns, holder_of

if TYPE_CHECKING:
    from django_mq.store import Cursor
    from django_mq.store.operate import Gone


class Done(NamedTuple):
    """A message with a unique id that ended; `success` begins the quiet time, if there is one."""

    message_id: int
    id: UniqueId
    success: bool


# An unrouted message has its id under no handler's name, also after a handler got it. LATERAL with
# a lock or LIMIT, ANY and scalar subqueries keep the lookups by index: a planner that thinks that
# little is there would read the whole table for each slice.
FREE = """
with holder as materialized (
    select u.id, u.queue, u.handler, u.type, u.unique_id,
           case when done.success then statement_timestamp() + u.unique_for end as quiet_until
      from (
        select done.message_id, done.success, done.queue, name.handler, done.type, done.unique_id
          from unnest(%(message_ids)s::bigint[], %(successes)s::bool[], %(queues)s::text[],
                      %(handlers)s::text[], %(types)s::text[], %(unique_ids)s::text[])
               as done (message_id, success, queue, handler, type, unique_id)
         cross join unnest(array['', nullif(done.handler, '')]) as name (handler)
         where name.handler is not null
         order by done.queue, name.handler, done.type, done.unique_id
     ) done
     cross join lateral (
        select u.id, u.queue, u.handler, u.type, u.unique_id, u.unique_for
          from django_mq_uniquekey u
         where u.queue = done.queue and u.handler = done.handler
           and u.type = done.type and u.unique_id = done.unique_id and u.put_aside is null
           and u.message_id = done.message_id
           for update
     ) u
), quieted as (
    update django_mq_uniquekey u
       set message_id = null, quiet_until = holder.quiet_until
      from holder
     where u.id = any(array(select id from holder)) and u.id = holder.id
       and holder.quiet_until is not null
), freed as (
    delete from django_mq_uniquekey
     where id = any(array(select id from holder where quiet_until is null))
)
select queue, handler, type, unique_id from holder
"""

# The unique id of `holder_of()` is free, or quiet: a scalar subquery, see the package.
_IS_FREE = """(select m.id
             from django_mq_queuedmessage m
            where m.id = u.message_id and m.dead_at is null) is null"""

# What was put aside becomes a message when nothing alive has its id: after the quiet time, if one
# has begun. It locks its row first, so it comes forward once.
COME_FORWARD = f"""
with aside as materialized (
    select a.*, found.seen_id, found.seen_until
      from (
        select found.id, u.message_id as seen_id, u.quiet_until as seen_until
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
         where {_IS_FREE}
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
     cross join lateral jsonb_to_record(aside.put_aside) as row (
        payload jsonb, max_attempts integer, schema_version integer, metadata jsonb,
        priority smallint, key text, retry jsonb, wants_result boolean, ordered boolean,
        due timestamptz, expires timestamptz, unique_for float8
     )
), taken as (
    insert into django_mq_uniquekey as u (queue, handler, type, unique_id, message_id, unique_for)
    select queue, handler, type, unique_id, message_id, make_interval(secs => unique_for)
      from next
     order by queue, handler, type, unique_id
        on conflict (queue, handler, type, unique_id) where put_aside is null do update
       set message_id = excluded.message_id, unique_for = excluded.unique_for, quiet_until = null
     where exists (
        select from next
         where next.message_id = excluded.message_id
           and next.seen_id is not distinct from u.message_id
           and next.seen_until is not distinct from u.quiet_until)
    returning u.message_id
), gone as (
    delete from django_mq_uniquekey
     where id = any(array(select next.id from next join taken using (message_id)))
), added as (
    insert into django_mq_queuedmessage (
        id, queue, type, payload, max_attempts, handler, schema_version, metadata, priority, key,
        retry, wants_result, ordered, unique_id, unique_for, processable_after, expires_at
    )
    select
        message_id, queue, type, payload, max_attempts, handler, schema_version, metadata,
        priority, key, retry, wants_result, ordered, unique_id, make_interval(secs => unique_for),
        greatest(due, seen_until, statement_timestamp()), expires
      from next join taken using (message_id)
    returning id
)
select id, pg_notify('django_mq', '') from added
"""  # noqa: S608


def end(cursor: Cursor, done: Sequence[Done]) -> list[int]:
    """Free the ids that these messages have, in the transaction that ends them.

    Those with `unique_for` stay quiet after a success. What was put aside becomes a message in
    the same transaction, and rings: returns the ids of such messages.
    """
    params = columns(each.id for each in done)
    params["message_ids"] = [each.message_id for each in done]
    params["successes"] = [each.success for each in done]
    cursor.execute(FREE, params)
    freed = [UniqueId._make(row) for row in cursor.fetchall()]
    # A statement of its own: with the ids locked it sees all that was put aside until now.
    return come_forward(cursor, freed) if freed else []


def end_removed(cursor: Cursor, gone: Sequence[Gone]) -> list[int]:
    """Free the unique ids of messages that were removed before they were handled."""
    done = [
        Done(each.id, UniqueId(each.queue, each.handler, each.type, each.unique_id), success=False)
        for each in gone
        if each.unique_id is not None
    ]
    return end(cursor, done) if done else []


def come_forward(cursor: Cursor, ids: Sequence[UniqueId]) -> list[int]:
    """Turn what is put aside for these ids into messages, where they are free; return their ids.

    It waits for a transaction that has taken such an id and is still open.
    """
    cursor.execute(COME_FORWARD, columns(ids))
    return [row[0] for row in cursor.fetchall()]


LEFT_ASIDE = f"""
select a.queue, a.handler, a.type, a.unique_id
  from django_mq_uniquekey a
  left join {holder_of("a")} on true
 where a.put_aside is not null and {_IS_FREE}
 limit %(limit)s
"""  # noqa: S608


def left_aside(cursor: Cursor, *, limit: int) -> list[UniqueId]:
    """Return ids that nothing alive has, though something is put aside for them.

    It was put aside while the message ended, or others deleted that by hand.
    """
    cursor.execute(LEFT_ASIDE, {"limit": limit})
    return [UniqueId._make(row) for row in cursor.fetchall()]


LOCK = """
select u.id
  from (
    select *
      from unnest(%(queues)s::text[], %(handlers)s::text[], %(types)s::text[],
                  %(unique_ids)s::text[]) as wanted (queue, handler, type, unique_id)
     order by queue, handler, type, unique_id
  ) wanted
 cross join lateral (
    select u.id
      from django_mq_uniquekey u
     where u.queue = wanted.queue and u.handler = wanted.handler and u.type = wanted.type
       and u.unique_id = wanted.unique_id and u.put_aside is null
    union all
    select u.id
      from django_mq_uniquekey u
     where u.queue = wanted.queue and u.handler = wanted.handler and u.type = wanted.type
       and u.unique_id = wanted.unique_id and u.put_aside is not null
 ) found
 cross join lateral (
    select u.id from django_mq_uniquekey u where u.id = found.id for update
  ) u
"""


def lock(cursor: Cursor, ids: Sequence[UniqueId]) -> None:
    """Wait until whoever ends the messages of these ids, or brings forward, has committed."""
    cursor.execute(LOCK, columns(ids))


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
    """Remove what is put aside and meets all that is given; return how many."""
    cursor.execute(DROP_ASIDE, {"type": type, "unique_id": unique_id})
    return len(cursor.fetchall())


# Of several dead letters with one id the last has it. What is put aside goes before them.
TAKE_AGAIN = f"""
with dead as materialized (
    select m.id, m.queue, m.handler, m.type, m.unique_id, m.unique_for
      from django_mq_queuedmessage m
     where m.id = any(%(ids)s::bigint[]) and m.dead_at is not null and m.unique_id is not null
       for no key update skip locked
), last as (
    select distinct on (queue, handler, type, unique_id) *
      from dead
     order by queue, handler, type, unique_id, id desc
), free as materialized (
    select last.*, u.message_id as seen_id, u.quiet_until as seen_until
      from last
      left join {holder_of("last")} on true
     where (u.quiet_until is null or u.quiet_until <= statement_timestamp())
       and {_IS_FREE}
       and not exists (
           select from django_mq_uniquekey a
            where a.queue = last.queue and a.handler = last.handler and a.type = last.type
              and a.unique_id = last.unique_id and a.put_aside is not null)
)
insert into django_mq_uniquekey as u (queue, handler, type, unique_id, message_id, unique_for)
select queue, handler, type, unique_id, id, unique_for
  from free
 order by queue, handler, type, unique_id
    on conflict (queue, handler, type, unique_id) where put_aside is null do update
   set message_id = excluded.message_id, unique_for = excluded.unique_for, quiet_until = null
 where exists (
    select from free
     where free.id = excluded.message_id
       and free.seen_id is not distinct from u.message_id
       and free.seen_until is not distinct from u.quiet_until)
returning message_id
"""  # noqa: S608


def take_again(cursor: Cursor, *, ids: Sequence[int]) -> list[int]:
    """Give the dead letters of `ids` their unique ids back, where those are free; return them."""
    cursor.execute(TAKE_AGAIN, {"ids": list(ids)})
    return [row[0] for row in cursor.fetchall()]


FORGET_QUIET = """
delete from django_mq_uniquekey
 where id = any(array(
    select id from django_mq_uniquekey
     where quiet_until <= statement_timestamp()
     order by quiet_until
     limit %(limit)s
       for update skip locked))
"""


def forget_quiet(cursor: Cursor, *, limit: int) -> None:
    """Remove ids whose quiet time is over: they read as free anyway."""
    cursor.execute(FORGET_QUIET, {"limit": limit})
