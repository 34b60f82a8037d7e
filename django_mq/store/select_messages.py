"""Select the messages that an operator requeues or purges, queue by queue in index order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.store import Cursor, queue_names
from django_mq.store.conditions import UNCLAIMED
from django_mq.store.error_groups import failed_last_with
from django_mq.store.readers import prepare_to_read


class Selection(NamedTuple):
    """Which messages to select (None: any).

    `older_than` is in seconds since the message died, or since the broadcast if it is alive.
    """

    queue: str | None = None
    type: str | None = None
    handler: str | None = None
    key: str | None = None
    fingerprint: str | None = None
    older_than: float | None = None
    limit: int | None = None


KEEP_SELECTABLE = """
select m.id
  from unnest(%(ids)s::bigint[]) as asked (id)
 cross join lateral (
    select m.id, m.dead_at
      from django_mq_queuedmessage m
     where m.id = asked.id and (m.dead_at is not null or %(waiting)s)
    offset 0
 ) m
 order by m.dead_at, m.id
"""


def keep_selectable(cursor: Cursor, *, ids: Sequence[int], waiting: bool) -> list[int]:
    """Return which of `ids` are dead letters, longest dead first; with `waiting`, return all."""
    cursor.execute(KEEP_SELECTABLE, {"ids": list(ids), "waiting": waiting})
    return [row[0] for row in cursor.fetchall()]


def _of_queue(condition: str, *, by: str, since: str) -> str:
    """Return a query for the rows of `asked.queue` that satisfy an index's condition, in its order.

    `since` is the column from which the age counts.
    """
    return f"""
    select found.*
      from (
        select m.id, m.dead_at
          from django_mq_queuedmessage m
         where m.queue = asked.queue and {condition}
           and (%(type)s::text is null or m.type = %(type)s)
           and (%(handler)s::text is null or m.handler = %(handler)s)
           and (%(key)s::text is null or m.key = %(key)s)
           and (%(fingerprint)s::text is null or {failed_last_with("%(fingerprint)s::text")})
           and (%(older_than)s::float8 is null
                or {since} <= statement_timestamp()
                              - make_interval(secs => %(older_than)s::float8))
         order by {by}
         limit %(limit)s
     ) found"""


_DEAD = _of_queue("m.dead_at is not null", by="m.dead_at, m.id", since="m.dead_at")
# A blocked row has a key, so these four cover every row.
_ALL = " union all ".join(
    (
        _DEAD,
        _of_queue(
            f"{UNCLAIMED} and m.blocked_by is null",
            by="m.priority desc, m.processable_after, m.id",
            since="m.created_at",
        ),
        _of_queue("m.leased_until is not null", by="m.leased_until, m.id", since="m.created_at"),
        _of_queue(
            f"{UNCLAIMED} and m.key is not null and m.blocked_by is not null",
            by="m.handler, m.key, m.id",
            since="m.created_at",
        ),
    )
)
_FIND = """
select m.id
  from unnest(%(queues)s::text[]) as asked (queue)
 cross join lateral ({rows}
 ) m
 order by m.dead_at, m.id
 limit %(limit)s
"""
FIND_DEAD = _FIND.format(rows=_DEAD)
FIND = _FIND.format(rows=_ALL)


def find(cursor: Cursor, wanted: Selection, *, waiting: bool) -> list[int]:
    """Return the ids of dead letters, longest dead first; with `waiting`, of live messages too.

    Reads no rows of other queues and, without `waiting`, no rows of live messages.
    """
    names = sorted(queue_names.names(cursor)) if wanted.queue is None else [wanted.queue]
    prepare_to_read(cursor)
    cursor.execute(FIND if waiting else FIND_DEAD, {**wanted._asdict(), "queues": names})
    return [row[0] for row in cursor.fetchall()]
