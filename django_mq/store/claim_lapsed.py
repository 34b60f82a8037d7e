"""Take over messages whose lease lapsed: their worker died, froze or lost its database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.store import queue_limits as gates
from django_mq.store.claimed_row import NEXT_ATTEMPT, REFUNDED, WIDTH, claimed_columns

if TYPE_CHECKING:
    from django_mq.store import Cursor

# The claim that takes over a lapsed row records the attempt that vanished with its worker, and
# dead-letters the message if that was its last. `suspect` is returned as it was before: a message
# that lapses a second time runs alone. Of a line (an order key, an ordered queue) only the first
# message can have run; the others are released, refunded, also when the first failed or died and
# its worker vanished before it released them. The lookup of earlier messages is written so that
# the planner does not scan the primary key up to them. The scan goes queue by queue, and the limit
# stops it: no more rows are scanned and locked than are taken.
CLAIM_LAPSED = f"""
with found as materialized (
    select m.*, m.attempts < m.max_attempts as again
      from unnest(%(queues)s::text[]) as asked (queue)
     cross join lateral (
        select m.*
          from django_mq_queuedmessage m
         where m.queue = asked.queue and m.leased_until <= statement_timestamp()
         order by m.leased_until, m.id
         limit %(limit)s
           for no key update of m skip locked
     ) m
     where {gates.is_open("asked.queue")}
     limit %(limit)s
), first as materialized (
    select *
      from found m
     where case
           when m.ordered then not exists (
               select from django_mq_queuedmessage e
                where e.queue = m.queue and e.leased_until is not null and e.id + 0 < m.id)
            and not exists (
               select from django_mq_queuedmessage e
                where (e.queue, e.id) < (m.queue, m.id) and e.queue >= m.queue and e.ordered
                  and (e.dead_at is null or not %(skip_dead)s))
           when m.key is not null then not exists (
               select from django_mq_queuedmessage e
                where e.queue = m.queue and e.handler = m.handler
                  and (e.key, e.id) < (m.key, m.id) and e.key >= m.key
                  and (e.dead_at is null or not %(skip_dead)s))
           else true
           end
), lapsed as materialized (
    select *
      from (
        select first.*, row_number() over line as n,
               sum(octet_length(payload::text)) over line as total
          from first
        window line as (order by leased_until, id)
      ) first
     where n = 1 or total <= %(bytes)s
), released as (
    update django_mq_queuedmessage m
       set leased_until = null, claimed_by = null, attempts = {REFUNDED}
     where m.id = any(array(select id from found except select id from first))
    returning m.id
), history as (
    insert into django_mq_failedattempt
           (message_id, queue, type, handler, attempt, worker, error_class, error_text, traceback)
    select id, queue, type, handler, attempts, split_part(claimed_by, ':', 1),
           'WorkerVanished', 'the lease lapsed: the worker died, froze or lost its database', ''
      from lapsed
)
update django_mq_queuedmessage m
   set attempts = case when lapsed.again then {NEXT_ATTEMPT} else m.attempts end,
       suspect = true,
       last_error = 'WorkerVanished: the lease lapsed',
       claimed_by = case when lapsed.again then %(claimer)s end,
       leased_until = case when lapsed.again
                           then statement_timestamp() + make_interval(secs => %(lease)s) end,
       dead_at = case when not lapsed.again then statement_timestamp() end,
       dead_reason = case when lapsed.again then '' else 'exhausted' end
  from lapsed
 where m.id = any(array[lapsed.id])
returning {claimed_columns(suspect="lapsed.suspect")},
          lapsed.leased_until, lapsed.again
"""  # noqa: S608  (built from constants)


class Lapsed(NamedTuple):
    """Lapsed rows: those taken over, and those that are dead since their last attempt vanished."""

    taken: list[ClaimedRow]
    dead: list[ClaimedRow]


NOTHING = Lapsed([], [])


def claim_lapsed(
    cursor: Cursor,
    *,
    queues: Sequence[str],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    skip_dead: bool = False,
    admitted: bool = False,
) -> Lapsed:
    """Take over up to `limit` messages of `queues` whose lease lapsed.

    Of each queue it takes the longest lapsed first, until the limit is reached. `max_bytes` is
    that of `claim()`.

    A row that its worker still has locked is running, however old its lease, and is skipped.
    Nothing is taken from a queue that is paused or backs off: its messages may be what kills the
    workers. `admitted`: the caller holds the gate of the queue, which may then back off or be
    limited. Only the first message of a line is taken (with `skip_dead`, the first that is not
    dead); the others are released.
    """
    cursor.execute(
        CLAIM_LAPSED,
        {
            "queues": list(queues),
            "claimer": claimer,
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
            "skip_dead": skip_dead,
            "admitted": admitted,
        },
    )
    found = sorted(cursor.fetchall(), key=lambda row: (row[-2], row[0]))
    taken = [ClaimedRow._make(row[:WIDTH]) for row in found if row[-1]]
    dead = [ClaimedRow._make(row[:WIDTH]) for row in found if not row[-1]]
    return Lapsed(taken, dead)


ANY_LAPSED = """
select exists (
    select from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.leased_until <= statement_timestamp())
"""


def any_lapsed(cursor: Cursor, *, queue: str) -> bool:
    """Return whether `queue` has a message whose lease lapsed."""
    cursor.execute(ANY_LAPSED, {"queue": queue})
    return bool(cursor.fetchone()[0])
