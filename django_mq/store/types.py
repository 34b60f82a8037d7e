"""The types of the newest messages: no index has them, so a bounded number is examined."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from django_mq.store.readers import prepare_to_read

if TYPE_CHECKING:
    from django_mq.store import Cursor

NEWEST = """
select newest.type, count(*)
  from (
    (select m.type, m.queue from django_mq_queuedmessage m order by m.id desc limit %(limit)s)
    union all
    (select h.type, h.queue
       from django_mq_handledmessage h
      order by h.ended_at desc, h.id desc
      limit %(limit)s)
 ) newest
 where %(queues)s::text[] is null or newest.queue = any(%(queues)s::text[])
 group by newest.type
"""


def newest(cursor: Cursor, *, limit: int, queues: Collection[str] | None) -> dict[str, int]:
    """Count the types among the `limit` newest stored and the `limit` newest handled messages.

    Only messages of `queues` count; None: of all.
    """
    prepare_to_read(cursor)
    only = None if queues is None else list(queues)
    cursor.execute(NEWEST, {"limit": limit, "queues": only})
    return dict(cursor.fetchall())
