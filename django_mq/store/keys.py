"""The lines of order keys: free the next message of a line.

The line of a key is (queue, handler, key); its head is the row with the lowest id. A claim parks
the messages that it finds behind a waiting head: `blocked_by` names the head. They are freed when
the head is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.store import array, texts

if TYPE_CHECKING:
    from django_mq.store import Cursor


#: Less than the id of every message.
BEFORE_ALL = -(2**63)


class KeyLine(NamedTuple):
    """The line of an order key; the messages before id `after` are gone or dead."""

    queue: str
    handler: str
    key: str
    after: int = BEFORE_ALL


# Freeing a row that is still behind another is harmless: the next claim parks it again. The heads
# come first; otherwise the planner begins with the parked rows if it expects few of them. The
# lookup starts behind the id that has ended, past the dead entries that a held snapshot keeps.
FREE_NEXT = """
with head as materialized (
    select head.id
      from unnest(%(queues)s::text[], %(handlers)s::text[], %(keys)s::text[], %(afters)s::bigint[])
           as line (queue, handler, key, after)
     cross join lateral (
        select m.id, m.blocked_by
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and (m.key, m.id) > (line.key, line.after) and m.key <= line.key
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


def free_next(cursor: Cursor, lines: Iterable[KeyLine]) -> None:
    """Free the first live message of each of `lines`; those before it are gone or dead.

    If several lines differ only in `after`, the first counts.
    """
    first = {line[:3]: line.after for line in sorted(lines, reverse=True)}
    if first:
        queues, handlers, keys = zip(*first, strict=True)
        cursor.execute(
            FREE_NEXT,
            {
                "queues": texts(queues),
                "handlers": texts(handlers),
                "keys": texts(keys),
                "afters": array(first.values()),
            },
        )


# Frees rows that were parked while their head was being settled, or whose head was deleted by hand.
# Any row of the line will do: the claim that meets it looks at the head. The head is looked up here
# only so that nothing is freed in a line that moves on anyway; the lookup gives up after 20 rows,
# since a line may have many dead letters that are skipped.
FREE_STRANDED = """
with recursive blocker (id, n) as (
    (select m.blocked_by, 1
       from django_mq_queuedmessage m
      where m.blocked_by > %(after)s
      order by m.blocked_by
      limit 1)
    union all
    select (select m.blocked_by
              from django_mq_queuedmessage m
             where m.blocked_by > blocker.id
             order by m.blocked_by
             limit 1), blocker.n + 1
      from blocker
     where blocker.id is not null and blocker.n < %(limit)s
), walked as materialized (
    select id from blocker where id is not null
), stranded as materialized (
    select line.*
      from walked
      left join lateral (
        select head.id, head.queue, head.handler, head.key, head.dead_at
          from django_mq_queuedmessage head
         where head.id = walked.id
         limit 1
     ) head on true
     cross join lateral (
        select m.id, m.queue, m.handler, m.key
          from django_mq_queuedmessage m
         where m.blocked_by = walked.id
         limit 1
     ) line
     where head.id is null or head.id = line.id
        or head.queue <> line.queue or head.handler <> line.handler
        or head.key is distinct from line.key
        or head.dead_at is not null and line.queue = any(%(skipping)s::text[])
), first as materialized (
    select case when head.id is null then line.id
                when head.blocked_by is not null and head.dead_at is null then head.id end as id
      from stranded line
      left join lateral (
        select head.*
          from (
            select m.id, m.blocked_by, m.dead_at
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler
               and m.key >= line.key and m.key <= line.key
             order by m.key, m.id
             limit 20
          ) head
         where head.dead_at is null or line.queue <> all(%(skipping)s::text[])
         limit 1
     ) head on true
), freed as (
    update django_mq_queuedmessage
       set blocked_by = null
     where id = any(array(
        select m.id
          from django_mq_queuedmessage m
         where m.id = any(array(select first.id from first where first.id is not null))
           for no key update skip locked))
    returning id
)
select (select count(*) from freed), (select max(id) from walked having count(*) >= %(limit)s)
"""


class FreedRows(NamedTuple):
    """How many rows were freed; `resume` is the last blocker looked at, None if that was all."""

    rows: int
    resume: int | None


def free_stranded(
    cursor: Cursor, *, skipping: Sequence[str], limit: int, after: int = BEFORE_ALL
) -> FreedRows:
    """Free one row of every line whose parked rows wait for a row that left the line.

    A row also left its line if it was unrouted and now has a handler, or if it was never in the
    line because another client wrote `blocked_by`. `skipping` names the queues in which a dead head
    counts as gone. Looks at up to `limit` blockers with ids above `after`.
    """
    cursor.execute(FREE_STRANDED, {"skipping": list(skipping), "limit": limit, "after": after})
    return FreedRows._make(cursor.fetchone())


NEXT_BLOCKER = """
select min(m.blocked_by) from django_mq_queuedmessage m where m.blocked_by > %(after)s
"""


def next_blocker(cursor: Cursor, *, after: int) -> int | None:
    """Return the lowest id above `after` that messages wait behind, None if there is none."""
    cursor.execute(NEXT_BLOCKER, {"after": after})
    found: int | None = cursor.fetchone()[0]
    return found
