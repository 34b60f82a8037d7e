"""The types of the newest, held and waiting messages: no index has them, so few are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.queue_names import LANES

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
    """Return the types, each with a count, of the newest messages: `limit` stored, `limit` handled.

    Only those in `queues` count (None: all). Call it after `prepare_to_read()`.
    """
    only = None if queues is None else list(queues)
    cursor.execute(NEWEST, {"limit": limit, "queues": only})
    return dict(cursor.fetchall())


# No index has the types of waiting messages, which may be anywhere in the order of the claim: among
# those due for longest, among those due last (behind a long backlog), or among those due next. Held
# messages are, too, since they are claimed again and again. The limits bound the rows read per
# queue and priority, and in all. If few messages are due, a row may be read twice.
_EXAMINED = f"""
  from (
    select near.*
      from lane
     cross join lateral (
        (select m.id, m.queue, m.type, m.handler, m.schema_version, m.held_since
           from django_mq_queuedmessage m
          where m.queue = lane.queue and m.priority = lane.priority
            and {WAITS}
            and m.processable_after <= statement_timestamp()
          order by m.processable_after
          limit %(limit)s)
        union all
        (select m.id, m.queue, m.type, m.handler, m.schema_version, m.held_since
           from django_mq_queuedmessage m
          where m.queue = lane.queue and m.priority = lane.priority
            and {WAITS}
            and m.processable_after <= statement_timestamp()
          order by m.processable_after desc
          limit %(limit)s)
        union all
        (select m.id, m.queue, m.type, m.handler, m.schema_version, m.held_since
           from django_mq_queuedmessage m
          where m.queue = lane.queue and m.priority = lane.priority
            and {WAITS}
            and m.processable_after > statement_timestamp()
          order by m.processable_after
          limit %(limit)s)
     ) near
     limit %(maximum)s
  ) examined
"""
HELD = f"""
with recursive {LANES}
select examined.type, count(distinct examined.id), min(examined.id)
{_EXAMINED}
 where examined.held_since is not null
 group by examined.type
 order by 2 desc, 1
"""
KINDS = f"""
with recursive {LANES}
select examined.queue, examined.type, examined.handler, examined.schema_version,
       count(distinct examined.id), min(examined.id)
{_EXAMINED}
 where examined.held_since is null
 group by examined.queue, examined.type, examined.handler, examined.schema_version
 order by 5 desc, 1, 2, 3, 4
 limit %(kinds)s
"""


class HeldMessages(NamedTuple):
    """The number of held messages that were read, and the lowest of their ids."""

    messages: int
    first_id: int


def held(
    cursor: Cursor, *, queues: Sequence[str], limit: int, maximum: int
) -> dict[str, HeldMessages]:
    """Return the held messages by type, most first, reading about `maximum` rows of `queues`.

    Of each queue and priority it reads the `limit` messages that have been due for longest, those
    that became due last, and those that are due next. Call it after `prepare_to_read()`.
    """
    cursor.execute(HELD, {"queues": list(queues), "limit": limit, "maximum": maximum})
    return {type: HeldMessages(messages, first) for type, messages, first in cursor.fetchall()}


class WaitingKind(NamedTuple):
    """Messages of one type for one handler, empty if a worker routes them, that wait in a queue.

    `messages` is the number that was read, `first_id` the lowest of their ids.
    """

    queue: str
    type: str
    handler: str
    schema_version: int
    messages: int
    first_id: int


def kinds(
    cursor: Cursor, *, queues: Sequence[str], limit: int, maximum: int, kinds: int
) -> list[WaitingKind]:
    """Return the most frequent kinds of messages that wait and are not held, at most `kinds`.

    It reads the same rows as `held()`. Call it after `prepare_to_read()`.
    """
    named = {"queues": list(queues), "limit": limit, "maximum": maximum, "kinds": kinds}
    cursor.execute(KINDS, named)
    return [WaitingKind._make(row) for row in cursor.fetchall()]
