"""Unique ids of messages that end: freed, quiet, or passed on to a message put aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.store import array, promotion
from django_mq.store.unique_ids import (
    IF_QUIET,
    IS_FREE,
    NAMES,
    UniqueId,
    columns,
    holder_of,
    if_as_seen,
)

if TYPE_CHECKING:
    from django_mq.store import Cursor
    from django_mq.store.message_changes import Removed


class EndedMessage(NamedTuple):
    """A message with a unique id that ended; `success` begins its quiet time, if it has one."""

    message_id: int
    id: UniqueId
    success: bool


# The id of an unrouted message is stored under the empty handler name, even after a handler got the
# message. For the forms of the lookups see `store/__init__.py`. An interval whose years and days
# cancel out, such as psql may write, would overflow the sum, so it is converted to seconds. A quiet
# time that is not over outlasts a message that was broadcast in it.
FREE = f"""
with holder as materialized (
    select u.id, u.queue, u.handler, u.type, u.unique_id,
           greatest(u.quiet_until, case when done.success and u.unique_for is not null then
                statement_timestamp() + make_interval(secs => least(greatest(
                    extract(epoch from u.unique_for), 0), 3155760000)::float8)
           end) as quiet_until
      from (
        select done.message_id, done.success, done.queue, name.handler, done.type, done.unique_id
          from unnest(%(message_ids)s::bigint[], %(successes)s::bool[], %(queues)s::text[],
                      %(handlers)s::text[], %(types)s::text[], %(unique_ids)s::text[])
               as done (message_id, success, queue, handler, type, unique_id)
         cross join unnest(array['', nullif(done.handler, '')]) as name (handler)
         where name.handler is not null
         order by done.queue collate "C", name.handler collate "C", done.type collate "C",
               done.unique_id collate "C"
     ) done
     cross join lateral (
        select u.id, u.queue, u.handler, u.type, u.unique_id, u.unique_for,
               {IF_QUIET} as quiet_until
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
select array_agg(queue)::text, array_agg(handler)::text, array_agg(type)::text,
       array_agg(unique_id)::text
  from holder
"""


def end(cursor: Cursor, done: Sequence[EndedMessage]) -> list[int]:
    """Free the unique ids of these messages, in the transaction that ends them.

    Ids with `unique_for` stay quiet after a success. Content put aside becomes a message in the
    same transaction, and rings. Returns the ids of these new messages.
    """
    params = columns([each.id for each in done])
    params["message_ids"] = array(each.message_id for each in done)
    params["successes"] = array(each.success for each in done)
    cursor.execute(FREE, params)
    freed = dict(zip(NAMES, cursor.fetchone(), strict=True))
    if freed["queues"] is None:
        return []
    # A separate statement: with the ids locked, its snapshot has everything put aside until now.
    aside = promotion.find_put_aside(cursor, freed)
    return promotion.promote_put_aside(cursor, aside) if aside else []


def end_removed(cursor: Cursor, removed: Sequence[Removed]) -> None:
    """Free the unique ids of messages that were removed unhandled."""
    done = [
        EndedMessage(
            each.id, UniqueId(each.queue, each.handler, each.type, each.unique_id), success=False
        )
        for each in removed
        if each.unique_id is not None
    ]
    if done:
        end(cursor, done)


# Of several dead letters with one id, the last gets it. Content put aside goes before them.
REACQUIRE = f"""
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
    select last.*, u.message_id as seen_id, u.quiet_until as seen_until, u.version as seen_version
      from last
      left join {holder_of("last")} on true
     where (u.quiet_until is null or u.quiet_until <= statement_timestamp())
       and {IS_FREE}
       and not exists (
           select from django_mq_uniquekey a
            where a.queue = last.queue and a.handler = last.handler and a.type = last.type
              and a.unique_id = last.unique_id and a.put_aside is not null)
)
insert into django_mq_uniquekey as u (queue, handler, type, unique_id, message_id, unique_for)
select queue, handler, type, unique_id, id, unique_for
  from free
 order by queue, handler, type, unique_id
    {if_as_seen("free", "id")}
"""


def reacquire(cursor: Cursor, *, ids: Sequence[int]) -> list[int]:
    """Give the dead letters `ids` their unique ids back where those are free; return their ids."""
    cursor.execute(REACQUIRE, {"ids": list(ids)})
    return [row[0] for row in cursor.fetchall()]
