"""The first messages of queues, in the order of their ids.

No index has the ids of a queue in order, nor those of living messages. So each queue gives its
first `limit` messages of each kind in the order of an index, and the lowest ids of all these are
returned: exactly the first messages of a queue with up to `limit` of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from django_mq.store.readers import prepare_to_read

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: Messages with an order key that are examined per queue for blocked ones.
WINDOW = 1000

# A blocked row has a key, so the indexes of waiting, leased and keyed rows cover all living ones.
_PEEK = """
select found.id
  from unnest(%(queues)s::text[]) as asked (queue)
 cross join lateral (
    select waiting.id
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = asked.queue
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
         order by m.priority desc, m.processable_after, m.id
         limit %(limit)s
        {locking}
     ) waiting
    union all
    select leased.id
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = asked.queue and m.leased_until is not null {lapsed}
         order by m.leased_until, m.id
         limit %(limit)s
        {locking}
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
            {locking}
         ) m
         where keyed.blocked_by is not null
         limit %(limit)s
     ) blocked
 ) found
 order by found.id
 limit %(limit)s
"""
PEEK = _PEEK.format(locking="offset 0", lapsed="")
_LAPSED = "and m.leased_until <= statement_timestamp()"
PEEK_FREE = _PEEK.format(locking="for share of m skip locked", lapsed=_LAPSED)
#: For logins and servers that only read: it cannot see which rows are locked.
PEEK_UNLEASED = _PEEK.format(locking="offset 0", lapsed=_LAPSED)


def peek(cursor: Cursor, *, queues: Iterable[str], limit: int, free: bool = False) -> list[int]:
    """Return the lowest `limit` ids of the first living messages of `queues`, together.

    `free` leaves out messages that are leased or locked by another session, and locks the others
    until the transaction ends: roll back to a savepoint. A login that may not update messages
    locks none and sees no locks.
    """
    may_lock = prepare_to_read(cursor)
    statement = (PEEK_FREE if may_lock else PEEK_UNLEASED) if free else PEEK
    cursor.execute(statement, {"queues": list(queues), "limit": limit, "window": WINDOW})
    return _ids(cursor.fetchall())


PEEK_DEAD = """
select m.id
  from unnest(%(queues)s::text[]) as asked (queue)
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


def peek_dead(cursor: Cursor, *, queues: Iterable[str], limit: int) -> list[int]:
    """Return the lowest `limit` ids of the longest dead messages of `queues`, together."""
    prepare_to_read(cursor)
    cursor.execute(PEEK_DEAD, {"queues": list(queues), "limit": limit})
    return _ids(cursor.fetchall())


def _ids(rows: Iterable[Sequence[int]]) -> list[int]:
    return [row[0] for row in rows]
