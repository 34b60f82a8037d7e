"""Find content that was put aside and left there: a scan of unique ids, in pieces."""

from __future__ import annotations

from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.free_unique_ids import IS_FREE
from django_mq.store.unique_ids import UniqueId, holder_of

LEFT_ASIDE = f"""
with walked as materialized (
    select a.queue, a.handler, a.type, a.unique_id
      from django_mq_uniquekey a
     where a.put_aside is not null
       and (a.unique_id, a.type, a.queue, a.handler)
           > (%(unique_id)s::text, %(type)s::text, %(queue)s::text, %(handler)s::text)
     order by a.unique_id, a.type, a.queue, a.handler
     limit %(limit)s
)
select a.queue, a.handler, a.type, a.unique_id, {IS_FREE}
  from walked a
  left join {holder_of("a")} on true
 order by a.unique_id, a.type, a.queue, a.handler
"""  # noqa: S608


class Aside(NamedTuple):
    """The free ids with content put aside; `resume` is the last id looked at, None at the end."""

    left: list[UniqueId]
    resume: UniqueId | None


def left_aside(cursor: Cursor, *, limit: int, after: UniqueId | None = None) -> Aside:
    """Return ids that no live message holds, though content is put aside for them.

    The content was put aside while the message ended, or the message was deleted by hand.
    Looks at up to `limit` ids with content put aside, those after `after`.
    """
    begin = after or UniqueId("", "", "", "")
    cursor.execute(LEFT_ASIDE, {**begin._asdict(), "limit": limit})
    found = [(UniqueId._make(row[:4]), row[4]) for row in cursor.fetchall()]
    resume = found[-1][0] if len(found) >= limit else None
    return Aside([id for id, free in found if free], resume)
