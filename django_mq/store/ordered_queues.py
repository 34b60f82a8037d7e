"""Ordered queues: one line over the whole fleet, owned by one worker, claimed from its head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.store import array
from django_mq.store.claim import EXCLUDED, excluding
from django_mq.store.claimed_row import NEXT_ATTEMPT, claimed_columns
from django_mq.store.conditions import WAITS
from django_mq.store.gates import is_open

if TYPE_CHECKING:
    from django_mq.store import Cursor

# SKIP LOCKED: another session may hold the row's lock for long (a worker frozen in a claim of the
# line, an operator's long transaction), and the worker's other queues would wait as well.
OWN = """
with before as materialized (
    select owner, owned_until from django_mq_queuestate where queue = %(queue)s
), free as materialized (
    select s.queue, s.owner
      from django_mq_queuestate s
     where s.queue = %(queue)s
       and (s.owner is null or s.owner = %(worker)s or s.owned_until <= statement_timestamp())
       for no key update skip locked
), taken as (
    update django_mq_queuestate s
       set owner = %(worker)s,
           owned_until = statement_timestamp() + make_interval(secs => %(lease)s)
      from free
     where s.queue = free.queue
    returning free.owner
), added as (
    insert into django_mq_queuestate as s (queue, owner, owned_until)
    select %(queue)s, %(worker)s, statement_timestamp() + make_interval(secs => %(lease)s)
     where not exists (select from before)
        on conflict (queue) do update
           set owner = excluded.owner, owned_until = excluded.owned_until
         where s.owner is null  -- another session has just inserted it for another reason
    returning null::text
)
select owner from taken
 union all
select * from added
 union all
select owner from before
 where owner = %(worker)s and owned_until > statement_timestamp()
   and not exists (select from taken)
"""


class OwnedQueue(NamedTuple):
    """A queue is ours; `previous_owner` is the worker that owned it until now, if any."""

    previous_owner: str | None


def own(cursor: Cursor, *, queue: str, worker: str, lease: float) -> OwnedQueue | None:
    """Own `queue` for `lease` seconds from now; return None if another worker owns it.

    If the queue is ours but its row is locked, it stays ours until the time that was set earlier.
    """
    cursor.execute(OWN, {"queue": queue, "worker": worker, "lease": lease})
    row = cursor.fetchone()
    return None if row is None else OwnedQueue(row[0])


DISOWN = """
with ours as materialized (
    select s.queue
      from django_mq_queuestate s
     where s.owner = %(worker)s
       and (%(queues)s::text[] is null or s.queue = any(%(queues)s::text[]))
       for no key update skip locked
)
update django_mq_queuestate s
   set owner = null, owned_until = null
  from ours
 where s.queue = ours.queue
"""


def disown(cursor: Cursor, *, worker: str, queues: Sequence[str] | None = None) -> None:
    """Give up `queues`, or all that `worker` owns; the ownership of locked rows lapses later."""
    cursor.execute(DISOWN, {"worker": worker, "queues": None if queues is None else list(queues)})


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


# Locks the queue's row first, so that no worker takes the line over before this commits.
HOLD_LINE = """
select queue
  from django_mq_queuestate
 where queue = %(queue)s and owner = %(worker)s and owned_until > statement_timestamp()
   for no key update skip locked
"""

# Claims from the head to the first gap, and only while nothing of the queue is in flight. With =,
# the planner may scan the primary key instead of the line.
CLAIM_LINE = f"""
with head as materialized (
    select m.id, m.payload::text as payload,
           m.dead_at is null and m.processable_after <= statement_timestamp() {EXCLUDED} as ok
      from django_mq_queuedmessage m
     where m.queue >= %(queue)s and m.queue <= %(queue)s and m.ordered
       and (m.dead_at is null or not %(skip_dead)s)
       and not exists (
           select from django_mq_queuedmessage in_flight
            where in_flight.queue = %(queue)s and in_flight.leased_until is not null)
       and {is_open("%(queue)s")}
     order by m.queue, m.id
     limit %(limit)s
), locked as materialized (
    select m.id, head.payload
      from (
        select head.*, bool_and(ok) over (order by id) as unbroken from head
      ) head
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = head.id and m.dead_at is null and m.leased_until is null
           and m.processable_after <= statement_timestamp()
           for no key update skip locked
     ) m
     where head.unbroken
     order by m.id
), taken as materialized (
    select id, payload, (%(claimers)s::text[])[(n - 1) / %(each)s + 1] as claimer
      from (
        select locked.id, locked.payload, row_number() over line as n,
               sum(octet_length(locked.payload)) over line as total,
               bool_and(locked.id = head.id) over line as unbroken
          from (select locked.*, row_number() over (order by id) as n from locked) locked
          join (select head.id, row_number() over (order by id) as n from head) head using (n)
        window line as (order by locked.id)
      ) locked
     where unbroken and (n = 1 or total <= %(bytes)s)
)
update django_mq_queuedmessage m
   set attempts = {NEXT_ATTEMPT}, claimed_by = taken.claimer, blocked_by = null,
       leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
  from taken
 where m.id = any(array[taken.id])
returning {claimed_columns(payload="taken.payload")}
"""


def claim(
    cursor: Cursor,
    *,
    queue: str,
    worker: str,
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    skip_dead: bool,
    admitted: bool = False,
    more_claimers: Sequence[str] = (),
    excluded: Sequence[int] = (),
) -> list[ClaimedRow]:
    """Take the first messages of `queue`, up to `limit` and without a gap, if `worker` owns it.

    A head that is delayed, retrying or (unless `skip_dead`) dead blocks the line, and so does any
    message in flight. The caller opens a transaction and commits it at once. The `more_claimers`
    share the rows. Rows in `excluded`, and the rows behind them, are left out.
    """
    cursor.execute(HOLD_LINE, {"queue": queue, "worker": worker})
    if cursor.fetchone() is None:
        return []
    cursor.execute(
        excluding(CLAIM_LINE, excluded),
        {
            "queue": queue,
            "excluded": array(excluded),
            "claimers": array((claimer, *more_claimers)),
            "each": -(-limit // (1 + len(more_claimers))),
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
            "skip_dead": skip_dead,
            "admitted": admitted,
        },
    )
    return [ClaimedRow._make(row) for row in sorted(cursor.fetchall())]
