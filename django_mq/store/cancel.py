"""Cancel waiting messages; never one that a worker holds."""

from __future__ import annotations

from collections.abc import Iterator

from django_mq.store import Cursor
from django_mq.store.kept_results import IDS, IS_KEPT, keep_removed
from django_mq.store.keys import BEFORE_ALL
from django_mq.store.message_changes import (
    REMOVED_COLUMNS,
    REPLY_TO_REMOVED,
    Removed,
    replace_replies,
)
from django_mq.store.message_filters import last_id

#: The number of messages, of any type, that one statement looks at if only a type is given.
WINDOW = 10_000


# A locked row is being claimed or settled: skip it, and count it as in flight.
def _cancel(ids: str) -> str:
    """Return the statement that cancels the messages whose ids the query `ids` returns."""
    return f"""
with matching as materialized (
    select m.id
      from ({ids}) asked (id)
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = asked.id and m.dead_at is null
           and (%(type)s::text is null or m.type = %(type)s)
           and (%(unique_id)s::text is null or m.unique_id = %(unique_id)s)
        offset 0
     ) m
), waiting as materialized (
    select m.id
      from matching
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = matching.id and m.leased_until is null and m.dead_at is null
           and {IS_KEPT}
           for update skip locked
     ) m
), removed as (
    delete from django_mq_queuedmessage
     where id = any(array(select id from waiting))
    {REPLY_TO_REMOVED}
select matched.count, removed.*
  from (select count(*) from matching) matched
  left join (select {REMOVED_COLUMNS} from removed) removed on true
 order by removed.id
"""


CANCEL = _cancel(IDS)
# The row of a unique id names the live message that holds the id.
UNIQUE_IDS = """
        select u.message_id
          from django_mq_uniquekey u
         where u.unique_id = %(unique_id)s and u.put_aside is null
    """
CANCEL_UNIQUE = _cancel(UNIQUE_IDS)


def cancel(
    cursor: Cursor, *, id: int | None, type: str | None, unique_id: str | None
) -> tuple[list[Removed], int]:
    """Delete the waiting messages that match every argument that is not None.

    Returns the deleted messages in the order of ids, and the number of others that match but are
    in flight: leased, or locked at this moment. Dead letters are neither deleted nor counted.
    An id or a unique id is found by its index. A type alone has none: the statements walk over all
    messages, `WINDOW` at a time.
    """
    params: dict[str, object] = {"type": type, "unique_id": unique_id}
    if id is None and unique_id is not None:
        return _run(cursor, CANCEL_UNIQUE, UNIQUE_IDS, params)
    removed: list[Removed] = []
    in_flight = 0
    for ids in [[id]] if id is not None else _of_type(cursor, type):
        found, flying = _run(cursor, CANCEL, IDS, {**params, "ids": ids})
        removed += found
        in_flight += flying
    return removed, in_flight


def _run(
    cursor: Cursor, statement: str, asked: str, params: dict[str, object]
) -> tuple[list[Removed], int]:
    kept = keep_removed(cursor, params, waiting=True, dead=False, reason="cancelled", asked=asked)
    cursor.execute(statement, {**params, "kept": kept, "reason": "cancelled"})
    rows = cursor.fetchall()
    removed = [Removed(*row[1:]) for row in rows if row[1] is not None]
    replace_replies(cursor, removed, "cancelled")
    return removed, rows[0][0] - len(removed)


WALK = """
select coalesce(array_agg(m.id) filter (where m.type = %(type)s and m.dead_at is null), '{}'),
       max(m.id)
  from (
    select m.id, m.type, m.dead_at
      from django_mq_queuedmessage m
     where m.id > %(after)s and m.id <= %(last)s
     order by m.id
     limit %(window)s
  ) m
"""


def _of_type(cursor: Cursor, type: str | None) -> Iterator[list[int]]:
    """Yield the ids of live messages of a type, window by window."""
    last = last_id(cursor)  # fix the end of the walk: broadcasts may outpace it
    after: int | None = BEFORE_ALL
    while after is not None and after < last:
        params = {"type": type, "after": after, "last": last, "window": WINDOW}
        cursor.execute(WALK, params)
        ids, after = cursor.fetchone()
        if ids:
            yield ids
