"""Ordered queues: one line over the whole fleet, owned by one worker, taken from its head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.store import gates
from django_mq.store.claimed import NEXT_ATTEMPT, claimed_columns

if TYPE_CHECKING:
    from django_mq.store import Cursor

# Not waited for where somebody has the row locked (who froze in a claim of the line, or decides
# something in a long transaction): the worker's other queues would wait as well.
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
         where s.owner is null  -- somebody wrote it for another reason at this moment
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


class Owned(NamedTuple):
    """A queue is ours; `before` is the worker that it belonged to until now, if any did."""

    before: str | None


def own(cursor: Cursor, *, queue: str, worker: str, lease: float) -> Owned | None:
    """Own `queue` for `lease` seconds from now; None when somebody else does.

    What is ours and locked by somebody stays so, for as long as was said before.
    """
    cursor.execute(OWN, {"queue": queue, "worker": worker, "lease": lease})
    row = cursor.fetchone()
    return None if row is None else Owned(row[0])


# Whoever holds the lock of a claimed row has its transaction's number as the row's xmax.
END_FROZEN = """
select m.id, pg_terminate_backend(holder.pid)
  from django_mq_queuedmessage m
  join pg_locks holder
    on holder.locktype = 'transactionid' and holder.transactionid = m.xmax and holder.granted
 where m.queue = %(queue)s and m.leased_until <= statement_timestamp()
   and starts_with(m.claimed_by, %(prefix)s)
"""


def end_frozen(cursor: Cursor, *, queue: str, worker: str) -> list[int]:
    """End the transactions in which `worker` still has lapsed messages of `queue` locked.

    Their effects are rolled back. Returns the ids of the messages.
    """
    cursor.execute(END_FROZEN, {"queue": queue, "prefix": f"{worker}:"})
    return [row[0] for row in cursor.fetchall()]


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
    """Give up `queues`, or whatever `worker` owns; what is locked lapses."""
    cursor.execute(DISOWN, {"worker": worker, "queues": None if queues is None else list(queues)})


# What came before the queue was ordered, or from those who do not know that it is. Once in line
# nothing is parked by its key any more.
ADOPT = """
update django_mq_queuedmessage
   set ordered = true, blocked_by = null
 where id = any(array(
    select waiting.id
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and not m.ordered
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
         limit %(limit)s
           for no key update of m skip locked
      ) waiting
    union all
    select parked.id
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and not m.ordered and m.key is not null
           and m.leased_until is null and m.blocked_by is not null and m.dead_at is null
         limit %(limit)s
           for no key update of m skip locked
      ) parked
     limit %(limit)s))
returning id
"""


def adopt(cursor: Cursor, *, queue: str, limit: int) -> int:
    """Put up to `limit` messages that wait beside the line of `queue` into it; return how many."""
    cursor.execute(ADOPT, {"queue": queue, "limit": limit})
    return len(cursor.fetchall())


# The owner's row is locked first, so that nobody takes the line over before this is committed.
HOLD_LINE = """
select queue
  from django_mq_queuestate
 where queue = %(queue)s and owner = %(worker)s and owned_until > statement_timestamp()
   for no key update skip locked
"""

# From the head on as far as it goes unbroken, and only when nothing of the queue is in flight.
# Asked with = the planner may walk the primary key instead of the line.
CLAIM_LINE = f"""
with head as materialized (
    select m.id, m.payload::text as payload,
           m.dead_at is null and m.processable_after <= statement_timestamp() as ok
      from django_mq_queuedmessage m
     where m.queue >= %(queue)s and m.queue <= %(queue)s and m.ordered
       and (m.dead_at is null or not %(skip_dead)s)
       and not exists (
           select from django_mq_queuedmessage flying
            where flying.queue = %(queue)s and flying.leased_until is not null)
       and {gates.is_open("%(queue)s")}
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
    select id, payload
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
   set attempts = {NEXT_ATTEMPT}, claimed_by = %(claimer)s, blocked_by = null,
       leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
  from taken
 where m.id = any(array[taken.id])
returning {claimed_columns(payload="taken.payload")}
"""  # noqa: S608  (made of our own texts)


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
) -> list[ClaimedRow]:
    """Take the first of the line of `queue`, up to `limit` and unbroken, if `worker` owns it.

    A head that is delayed, retrying or (unless `skip_dead`) dead blocks the line, and so does
    whatever is in flight. The caller has opened a transaction, and commits it at once.
    """
    cursor.execute(HOLD_LINE, {"queue": queue, "worker": worker})
    if cursor.fetchone() is None:
        return []
    cursor.execute(
        CLAIM_LINE,
        {
            "queue": queue,
            "claimer": claimer,
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
            "skip_dead": skip_dead,
            "admitted": admitted,
        },
    )
    return [ClaimedRow._make(row) for row in sorted(cursor.fetchall())]
