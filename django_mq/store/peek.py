"""The first messages of queues, in the order of their ids.

No index has the ids of a queue, or of live messages, in order. So the first `limit` messages of
each kind are read per queue in the order of an index, and the lowest of all these ids are returned.
The result is exact for a queue with up to `limit` messages of each kind. Over all queues together,
the first messages are those at the beginning of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django_mq.store import Cursor, queue_names
from django_mq.store.conditions import WAITS
from django_mq.store.readers import prepare_to_read

#: Messages with an order key that are examined per queue for blocked ones.
WINDOW = 1000
#: Messages, dead ones included, that are examined for the first of all queues.
FIRST = 10_000

# A blocked row has a key, so the indexes of waiting, leased and keyed rows cover all live ones.
_PEEK = f"""
select found.id
  from unnest(%(queues)s::text[]) as asked (queue)
 cross join lateral (
    select waiting.id
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = asked.queue
           and {WAITS}
         order by m.priority desc, m.processable_after, m.id
         limit %(limit)s
        {{locking}}
     ) waiting
    union all
    select leased.id
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = asked.queue and m.leased_until is not null {{lapsed}}
         order by m.leased_until, m.id
         limit %(limit)s
        {{locking}}
     ) leased
    union all
    select blocked.id
      from (
        select m.id
          from (
            select m.id, m.blocked_by
              from django_mq_queuedmessage m
             where m.queue = asked.queue and m.key is not null
             order by m.handler, m.key, m.id
             limit %(window)s
         ) keyed
         cross join lateral (
            select m.id
              from django_mq_queuedmessage m
             where m.id = keyed.id and m.blocked_by is not null
               and m.leased_until is null and m.dead_at is null
            {{locking}}
         ) m
         where keyed.blocked_by is not null
         limit %(limit)s
     ) blocked
 ) found
 order by found.id
 limit %(limit)s
"""
_LOCK, _NO_LOCK = "for share of m skip locked", "offset 0"
_LAPSED = "and m.leased_until <= statement_timestamp()"
PEEK = _PEEK.format(locking=_NO_LOCK, lapsed="")
PEEK_FREE = _PEEK.format(locking=_LOCK, lapsed=_LAPSED)
#: For read-only logins and servers: it cannot see which rows are locked.
PEEK_UNLEASED = _PEEK.format(locking=_NO_LOCK, lapsed=_LAPSED)

_PEEK_FIRST = """
select first.id
  from (
    select m.id, m.dead_at
      from django_mq_queuedmessage m
     order by m.id
     limit %(first)s
 ) first
 cross join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.id = first.id and m.dead_at is null {lapsed}
    {locking}
 ) m
 where first.dead_at is null
 order by first.id
 limit %(limit)s
"""
_NOT_LEASED = f"and (m.leased_until is null or {_LAPSED.removeprefix('and ')})"
PEEK_FIRST = _PEEK_FIRST.format(locking=_NO_LOCK, lapsed="")
PEEK_FIRST_FREE = _PEEK_FIRST.format(locking=_LOCK, lapsed=_NOT_LEASED)
PEEK_FIRST_UNLEASED = _PEEK_FIRST.format(locking=_NO_LOCK, lapsed=_NOT_LEASED)
HAS_MORE = """
select exists (select from django_mq_queuedmessage m order by m.id offset %(first)s)
"""


def peek(
    cursor: Cursor, *, queues: Iterable[str] | None, limit: int, free: bool = False
) -> list[int]:
    """Return the lowest `limit` ids of the first live messages of all `queues` together.

    `queues` is None for all queues. `free` leaves out messages that are leased or locked by another
    session, and locks the others until the transaction ends: roll back to a savepoint to release
    them. A login that may not update messages locks none and sees no locks.
    """
    may_lock = prepare_to_read(cursor)
    kind = (1 if may_lock else 2) if free else 0
    if queues is None:
        statement = (PEEK_FIRST, PEEK_FIRST_FREE, PEEK_FIRST_UNLEASED)[kind]
        cursor.execute(statement, {"first": FIRST, "limit": limit})
        found = _ids(cursor.fetchall())
        if len(found) == limit or not _has_more(cursor):
            return found
        queues = queue_names.names(cursor)
    statement = (PEEK, PEEK_FREE, PEEK_UNLEASED)[kind]
    cursor.execute(statement, {"queues": list(queues), "limit": limit, "window": WINDOW})
    return _ids(cursor.fetchall())


def _has_more(cursor: Cursor) -> bool:
    cursor.execute(HAS_MORE, {"first": FIRST})
    return bool(cursor.fetchone()[0])


# All queues: those that have dead letters, by a loose index scan.
PEEK_DEAD = f"""
with recursive {queue_names.queue_scan("dead", "m.dead_at is not null")}
select m.id
  from (
    select queue from dead where queue is not null and %(queues)s::text[] is null
    union all
    select queue from unnest(%(queues)s::text[]) as named (queue)
 ) as asked (queue)
 cross join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.queue = asked.queue and m.dead_at is not null
     order by m.dead_at, m.id
     limit %(limit)s
 ) m
 order by m.id
 limit %(limit)s
"""


def peek_dead(cursor: Cursor, *, queues: Iterable[str] | None, limit: int) -> list[int]:
    """Return the lowest `limit` ids of the longest dead messages of all `queues` together.

    `queues` is None for all queues.
    """
    prepare_to_read(cursor)
    asked = None if queues is None else list(queues)
    cursor.execute(PEEK_DEAD, {"queues": asked, "limit": limit})
    return _ids(cursor.fetchall())


def _ids(rows: Iterable[Sequence[int]]) -> list[int]:
    return [row[0] for row in rows]
