"""Adopt: move messages that wait outside the line of an ordered queue into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from django_mq.store.conditions import WAITS

if TYPE_CHECKING:
    from django_mq.store import Cursor

# Adopts messages broadcast before the queue was ordered, or by producers that do not know that it
# is. In the line, no message is parked by its key. No index finds the messages outside the line, so
# two scans look for them in windows: waiting rows in the order of mq_claim, and keyed rows in the
# order of mq_key.
ADOPT = f"""
with waiting as materialized (
    (select m.id, m.ordered, m.priority, m.processable_after as at
       from django_mq_queuedmessage m
      where m.queue = %(queue)s and m.priority = %(priority)s::smallint
        and {WAITS}
        and (m.processable_after, m.id) > (%(at)s::timestamptz, %(id)s)
      order by m.processable_after, m.id
      limit %(limit)s)
    union all
    (select m.id, m.ordered, m.priority, m.processable_after
       from django_mq_queuedmessage m
      where m.queue = %(queue)s and m.priority < %(priority)s::smallint
        and {WAITS}
      order by m.queue, m.priority desc, m.processable_after, m.id
      limit %(limit)s)
    limit %(limit)s
), keyed as materialized (
    select m.id, m.ordered, m.handler, m.key
      from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.key is not null
       and (m.handler, m.key, m.id) > (%(handler)s::text, %(key)s::text, %(key_id)s)
     order by m.handler, m.key, m.id
     limit %(limit)s
), adopted as (
    update django_mq_queuedmessage
       set ordered = true, blocked_by = null
     where id = any(array(
        select m.id
          from (
            select waiting.id from waiting where not waiting.ordered
            union
            select keyed.id from keyed where not keyed.ordered
          ) beside
         cross join lateral (
            select m.id
              from django_mq_queuedmessage m
             where m.id = beside.id and not m.ordered
               and m.leased_until is null and m.dead_at is null
               for no key update skip locked
         ) m))
    returning id
)
select (select count(*) from adopted), last.*, last_keyed.*
  from (select) one
  left join (
    select w.priority, w.at::text, w.id
      from waiting w
     where (select count(*) from waiting) >= %(limit)s
     order by w.priority, w.at desc, w.id desc
     limit 1
  ) last on true
  left join (
    select k.handler, k.key, k.id
      from keyed k
     where (select count(*) from keyed) >= %(limit)s
     order by k.handler desc, k.key desc, k.id desc
     limit 1
  ) last_keyed on true
"""


class AdoptResume(NamedTuple):
    """Where the two scans of a queue resume: the scan of waiting rows, and the scan of keyed rows.

    A scan without a priority, or without a handler, is over and waits for the other to end.
    """

    priority: int | None = 2**15 - 1
    at: str = "-infinity"
    id: int = 0
    handler: str | None = ""
    key: str = ""
    key_id: int = 0


class AdoptedMessages(NamedTuple):
    """How many messages joined the line; `resume` is where to go on, None at the end."""

    rows: int
    resume: AdoptResume | None


def adopt(
    cursor: Cursor, *, queue: str, limit: int, after: AdoptResume | None = None
) -> AdoptedMessages:
    """Move the messages of `queue` that wait outside its line into the line.

    Looks at up to `limit` waiting rows and as many keyed rows, from `after` on.
    """
    begin = after or AdoptResume()
    cursor.execute(ADOPT, {**begin._asdict(), "queue": queue, "limit": limit})
    rows, *found = cursor.fetchone()
    if found[0] is None and found[3] is None:
        return AdoptedMessages(rows, None)
    waiting = found[:3] if found[0] is not None else (None, "-infinity", 0)
    keyed = found[3:] if found[3] is not None else (None, "", 0)
    return AdoptedMessages(rows, AdoptResume(*waiting, *keyed))
