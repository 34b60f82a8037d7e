"""Take over messages whose lease lapsed: their worker died, froze or lost its database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow, Fence
from django_mq.store import LOCK_SKIPPING, array, fence_columns, fenced, names
from django_mq.store.claim import EXCLUDED, LANE_START, excluding
from django_mq.store.claimed_row import (
    COLUMN_COUNT,
    NEXT_ATTEMPT,
    REFUNDED,
    claimed_columns,
    unstarted_claim,
)
from django_mq.store.gates import is_open

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: A `leased_until`, in seconds since 1970, and an id.
Mark = tuple[float, int]

# A slice that holds locks on rows keeps their leases from being renewed. When its process is ended
# by a timeout or an operator, the locks are free before a sibling has settled the messages: that of
# the handler with that cause, the others uncharged. When the slice ends, they are free before the
# next renewal. So for the length of a lease, the last heartbeat of a process protects what it
# lists: `running`, and in `ran` also what it could not renew.
# Only the heartbeat of the claimer counts: an earlier claimer may have been frozen, and still run
# the message. Each message looks up one row: against the lists of the whole fleet, 100 messages
# took 130 ms.
_NOT_RUNNING = """not coalesce((
                   select w.running @> to_jsonb(m.id) or w.ran ? m.id::text
                     from django_mq_workerheartbeat w
                    where w.id = split_part(m.claimed_by, ':', 1)
                      and w.last_seen > statement_timestamp()
                                        - make_interval(secs => %(lease)s)), false)"""

# The claim that takes over a lapsed row records the attempt that vanished with its worker, and
# dead-letters the message if that was its last. `suspect` is returned with its previous value: a
# message that lapses a second time runs alone. Messages that cannot have run are released and
# refunded: those that their claim has not started, and in a line (an order key, an ordered queue)
# all but the first, even if that failed or died and the worker vanished before it released them.
# The head of a key is looked up once per claim: while a session holds a snapshot, the lookup walks
# over all rows that the key had. The lookups are written so that the planner does not scan the
# primary key up to the row. The scan goes queue by queue, from the mark of each, and stops at the
# window. Without lines the window is the limit: no more rows are scanned and locked than are
# changed, unless their payloads are too large.
# Behind a pooler the planner may hash the queues, which loses their order: hence `ordinal`.
# PostgreSQL 15 fails on `nth <= limit`: it makes that the run condition of a window that it has
# optimized away.
CLAIM_LAPSED = f"""
with found as materialized (
    select found.*, row_number() over () as n
      from (
        select m.*
          from (
            select asked.queue, asked.at, asked.id
              from unnest(%(queues)s::text[], %(ats)s::float8[], %(ids)s::bigint[])
                   with ordinality as asked (queue, at, id, ordinal)
             where {is_open("asked.queue")}
             order by asked.ordinal
         ) asked
         cross join lateral (
            select m.*
              from django_mq_queuedmessage m
             where m.queue = asked.queue and m.leased_until <= statement_timestamp()
               and (m.leased_until, m.id) > (to_timestamp(asked.at), asked.id) {EXCLUDED}
               and (%(suspects)s or not m.suspect)
               and {_NOT_RUNNING}
             order by m.leased_until, m.id
             limit %(window)s
               for no key update of m skip locked
         ) m
         limit %(window)s
      ) found
), asking as (
    select found.*,
           case when key is not null and not ordered
                 and row_number() over (partition by queue, handler, key order by n) = 1
                then key end as head_key
      from found
), headed as (
    select asking.*, max(head.id) over (partition by queue, handler, key) as head
      from asking
      left join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = asking.queue and m.handler = asking.handler
           and m.key >= asking.head_key and m.key <= asking.head_key
           and (m.dead_at is null or not %(skip_dead)s)
         order by m.key, m.id
         limit 1
     ) head on head_key is not null
), judged as (
    select m.*, m.attempts < m.max_attempts as again,
           case
           when m.unstarted_claim = m.claimed_by then false
           when m.ordered then not exists (
               select from django_mq_queuedmessage e
                where e.queue = m.queue and e.leased_until is not null and e.id + 0 < m.id)
            and not exists (
               select from django_mq_queuedmessage e
                where (e.queue, e.id) < (m.queue, m.id) and e.queue >= m.queue and e.ordered
                  and (e.dead_at is null or not %(skip_dead)s))
           when m.key is not null then m.id = m.head
           else true
           end as runs
      from headed m
), kept as materialized (
    select *
      from (
        select counted.*,
               sum(octet_length(payload::text)) filter (where runs) over (order by n) as total
          from (
            select judged.*, count(*) filter (where runs) over (order by n) as nth
              from judged
          ) counted
         where nth + 0 <= %(limit)s
      ) counted
     where nth <= 1 or total <= %(bytes)s
), released as (
    update django_mq_queuedmessage m
       set leased_until = null, claimed_by = null, attempts = {REFUNDED}
     where m.id = any(array(select id from kept where not runs))
), history as (
    insert into django_mq_failedattempt
           (message_id, queue, type, handler, attempt, worker, error_class, error_text, traceback)
    select id, queue, type, handler, attempts, split_part(claimed_by, ':', 1),
           'WorkerVanished', 'the lease lapsed: the worker died, froze or lost its database', ''
      from kept where runs
), settled as (
    update django_mq_queuedmessage m
       set attempts = case when kept.again then {NEXT_ATTEMPT} else m.attempts end,
           suspect = true,
           last_error = 'WorkerVanished: the lease lapsed',
           claimed_by = case when kept.again then %(claimer)s end,
           unstarted_claim = {unstarted_claim("%(claimer)s::text")},
           leased_until = case when kept.again
                               then statement_timestamp() + make_interval(secs => %(lease)s) end,
           dead_at = case when not kept.again then statement_timestamp() end,
           dead_reason = case when kept.again then '' else 'exhausted' end
      from kept
     where kept.runs and m.id = any(array[kept.id])
    returning {claimed_columns(suspect="kept.suspect")},
              kept.queue, date_part('epoch', kept.leased_until), kept.id, kept.n, kept.again
), ended as (
    select * from settled
    union all
    select {", ".join(["null"] * COLUMN_COUNT)},
           queue, date_part('epoch', leased_until), id, n, null
      from kept
     where not runs
)
select * from ended order by n
"""


class Lapsed(NamedTuple):
    """Lapsed rows: taken over, dead after their last attempt, and the number of released ones.

    `marks` says, for each queue, where the scan stopped: `leased_until` and id of its last row.
    """

    taken: list[ClaimedRow]
    dead: list[ClaimedRow]
    released: int = 0
    marks: Mapping[str, Mark] = {}


NOTHING = Lapsed([], [])


def claim_lapsed(
    cursor: Cursor,
    *,
    queues: Sequence[str],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    window: int = 0,
    skip_dead: bool = False,
    admitted: bool = False,
    suspects: bool = True,
    marks: Mapping[str, Mark] | None = None,
    excluded: Sequence[int] = (),
    nonatomic: Sequence[str] = (),
) -> Lapsed:
    """Take over up to `limit` messages of `queues` whose lease lapsed.

    Queue by queue, in their order, it takes the longest lapsed first, until the limit is reached.
    `max_bytes` is as in `claim()`. The scan of a queue begins behind its mark, if it has one; rows
    that were locked at an earlier scan lie before the mark.

    A row that its worker still has locked is running, however old its lease, and is skipped. So is
    a row that the worker listed at its last heartbeat, as running or as not renewed, if that is not
    older than `lease`. Nothing is taken from a queue that is paused or backs off: its messages may
    be killing the workers. `admitted`: the caller holds the gate of the queue, which may then back
    off or be limited. Without `suspects`, those are left out. Only the first message of a line is
    taken (with `skip_dead`, the first that is not dead); the others are released, and so are
    messages that their claim (`unstarted_claim`) has not started. It examines `limit` rows, or
    `window` if that is more, so that the other messages of a line are released with the first. Rows
    in `excluded` are left out. `nonatomic` is as in `claim()`.
    """
    begin = [(marks or {}).get(queue, LANE_START) for queue in queues]
    cursor.execute(
        excluding(CLAIM_LAPSED, excluded),
        {
            "excluded": array(excluded),
            "queues": list(queues),
            "ats": [at for at, _ in begin],
            "ids": [id for _, id in begin],
            "claimer": claimer,
            "lease": lease,
            "limit": limit,
            "window": max(limit, window),
            "bytes": max_bytes,
            "skip_dead": skip_dead,
            "admitted": admitted,
            "suspects": suspects,
            "nonatomic": names(nonatomic),
        },
    )
    found = cursor.fetchall()
    left = {row[COLUMN_COUNT]: (row[COLUMN_COUNT + 1], row[COLUMN_COUNT + 2]) for row in found}
    found.sort(key=itemgetter(COLUMN_COUNT + 1, COLUMN_COUNT + 2))
    taken = [ClaimedRow._make(row[:COLUMN_COUNT]) for row in found if row[-1]]
    dead = [ClaimedRow._make(row[:COLUMN_COUNT]) for row in found if row[-1] is False]
    return Lapsed(taken, dead, len(found) - len(taken) - len(dead), left)


FORGET_LAPSE = f"""
update django_mq_queuedmessage
   set suspect = false
 where id = any(array(
    select m.id
      from {fenced(last=LOCK_SKIPPING)}))
returning id
"""


def forget_lapse(cursor: Cursor, fences: Sequence[Fence]) -> set[int]:
    """Forget that messages lapsed, before they are released: they were taken over but not started.

    Otherwise their next claim would take them for suspects, although none has lapsed twice. Returns
    the ids changed.
    """
    cursor.execute(FORGET_LAPSE, fence_columns(fences))
    return {row[0] for row in cursor.fetchall()}


ANY_LAPSED = """
select exists (
    select from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.leased_until <= statement_timestamp()
       and (m.leased_until, m.id) > (to_timestamp(%(at)s), %(id)s))
"""


def any_lapsed(cursor: Cursor, *, queue: str, mark: Mark = LANE_START) -> bool:
    """Return whether `queue` has a message behind `mark` whose lease lapsed."""
    cursor.execute(ANY_LAPSED, {"queue": queue, "at": mark[0], "id": mark[1]})
    return bool(cursor.fetchone()[0])
