"""The lines of order keys: free what comes next in them.

The line of a key is (queue, handler, key); its head is the row with the lowest id. What was found
behind a head that waits is parked, `blocked_by` it, and freed when that one is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.store import Cursor


class Line(NamedTuple):
    """The line of a key."""

    queue: str
    handler: str
    key: str


# Freeing a row that is still behind another is harmless: the next claim parks it again. The heads
# come first: where the planner thinks that few are parked it would begin with those.
FREE_NEXT = """
with head as materialized (
    select head.id
      from unnest(%(queues)s::text[], %(handlers)s::text[], %(keys)s::text[])
           as line (queue, handler, key)
     cross join lateral (
        select m.id, m.blocked_by
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and m.key >= line.key and m.key <= line.key
           and m.dead_at is null
         order by m.key, m.id
         limit 1
     ) head
     where head.blocked_by is not null
)
update django_mq_queuedmessage
   set blocked_by = null
 where id = any(array(
    select m.id
      from django_mq_queuedmessage m
     where m.id = any(array(select head.id from head))
       for no key update skip locked))
"""


def free_next(cursor: Cursor, lines: Iterable[Line]) -> None:
    """Free what is now the first of each of `lines`: whatever was before it is gone, or dead."""
    found = sorted(set(lines))
    if found:
        queues, handlers, keys = zip(*found, strict=True)
        cursor.execute(
            FREE_NEXT, {"queues": list(queues), "handlers": list(handlers), "keys": list(keys)}
        )


# A row that was parked while its head was being settled, or whose head somebody deleted by hand.
FREE_STRANDED = """
with recursive blocker as (
    (select m.blocked_by as id
       from django_mq_queuedmessage m
      where m.blocked_by is not null
      order by m.blocked_by
      limit 1)
    union all
    select (select m.blocked_by
              from django_mq_queuedmessage m
             where m.blocked_by > blocker.id
             order by m.blocked_by
             limit 1)
      from blocker
     where blocker.id is not null
), stranded as (
    select line.queue, line.handler, line.key
      from blocker
      left join django_mq_queuedmessage head on head.id = blocker.id
     cross join lateral (
        select m.queue, m.handler, m.key
          from django_mq_queuedmessage m
         where m.blocked_by = blocker.id
         limit 1
     ) line
     where blocker.id is not null
       and (head.id is null or head.handler <> line.handler
            or head.dead_at is not null and line.queue = any(%(skipping)s::text[]))
     limit %(limit)s
), first as materialized (
    select head.id
      from stranded line
     cross join lateral (
        select m.id, m.blocked_by, m.dead_at
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and m.key >= line.key and m.key <= line.key
           and (m.dead_at is null or line.queue <> all(%(skipping)s::text[]))
         order by m.key, m.id
         limit 1
     ) head
     where head.blocked_by is not null and head.dead_at is null
)
update django_mq_queuedmessage
   set blocked_by = null
 where id = any(array(
    select m.id
      from django_mq_queuedmessage m
     where m.id = any(array(select first.id from first))
       for no key update skip locked))
returning id
"""


def free_stranded(cursor: Cursor, *, skipping: Sequence[str], limit: int) -> int:
    """Free the first of every line whose parked rows wait for one that is gone.

    Gone from the line: also when it was unrouted, and has a handler now. In the queues
    `skipping` a dead head counts as gone. Returns how many were freed.
    """
    cursor.execute(FREE_STRANDED, {"skipping": list(skipping), "limit": limit})
    return len(cursor.fetchall())
