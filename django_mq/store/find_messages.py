"""Find the messages of an order key or a unique id, whatever their queue and handler, by index."""

from __future__ import annotations

from django_mq.store import Cursor

# A loose index scan: one probe for each queue and handler that has messages with a key.
_LINES = """
with recursive line (queue, handler) as (
    (select m.queue, m.handler
       from django_mq_queuedmessage m
      where m.key is not null
      order by m.queue, m.handler
      limit 1)
    union all
    select following.queue, following.handler
      from line
     cross join lateral (
        select m.queue, m.handler
          from django_mq_queuedmessage m
         where m.key is not null and (m.queue, m.handler) > (line.queue, line.handler)
         order by m.queue, m.handler
         limit 1
     ) following
)
"""

FIND = f"""{_LINES}
select found.id
  from line
 cross join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.queue = line.queue and m.handler = line.handler and m.key = %(key)s
     order by m.id desc
     limit %(limit)s
 ) found
 union all
select u.message_id
  from django_mq_uniquekey u
 where u.unique_id = %(unique_id)s and u.put_aside is null and u.message_id is not null
 order by 1 desc
 limit %(limit)s
"""


def find(cursor: Cursor, *, key: str, unique_id: str | None, limit: int) -> list[int]:
    """Return the ids of the newest messages with this order key, or that hold this unique id."""
    cursor.execute(FIND, {"key": key, "unique_id": unique_id, "limit": limit})
    return [row[0] for row in cursor.fetchall()]


LINES_OF_KEY = f"""{_LINES}
select line.queue, line.handler
  from line
 where exists (
    select from django_mq_queuedmessage m
     where m.queue = line.queue and m.handler = line.handler and m.key = %(key)s)
"""


def lines_of_key(cursor: Cursor, key: str) -> list[tuple[str, str]]:
    """Return the queues and handlers that have messages with this order key."""
    cursor.execute(LINES_OF_KEY, {"key": key})
    return cursor.fetchall()


def _step(compared: str, order: str) -> str:
    return f"""{_LINES}
select found.id
  from line
 cross join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.queue = line.queue and m.handler = line.handler and m.key = %(key)s
       and m.id {compared} %(after)s
     order by m.id {order}
     limit %(limit)s
 ) found
 order by 1 {order}
offset %(limit)s - 1
 limit 1
"""


STEP_DOWN, STEP_UP = _step("<", "desc"), _step(">", "asc")


def step(cursor: Cursor, key: str, *, after: int | None, ascending: bool, limit: int) -> int | None:
    """Return the id of the `limit`-th message with this order key; None if there are fewer.

    Counts from the newest or, if `ascending`, the oldest one on, or from the one next to `after`.
    """
    end = -(2**63) if ascending else 2**63 - 1
    asked = {"key": key, "after": end if after is None else after, "limit": limit}
    cursor.execute(STEP_UP if ascending else STEP_DOWN, asked)
    row = cursor.fetchone()
    return None if row is None else int(row[0])
