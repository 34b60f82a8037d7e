"""Ordered queues: one line over the whole fleet, owned by one worker, claimed from its head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.policy.line_marks import FRONT, LineMarks, Snapshot
from django_mq.store import array, names
from django_mq.store.claim import EXCLUDED, excluding
from django_mq.store.claimed_row import NEXT_ATTEMPT, claimed_columns, unstarted_claim
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


# A lease of null is no lease: owned_until becomes null, too.
DISOWN = """
with ours as materialized (
    select s.queue
      from django_mq_queuestate s
     where s.owner = %(worker)s
       and (%(queues)s::text[] is null or s.queue = any(%(queues)s::text[]))
       for no key update skip locked
)
update django_mq_queuestate s
   set owner = %(to)s::text,
       owned_until = statement_timestamp() + make_interval(secs => %(lease)s::float8)
  from ours
 where s.queue = ours.queue
returning s.queue
"""


def disown(cursor: Cursor, *, worker: str, queues: Sequence[str] | None = None) -> None:
    """Give up `queues`, or all that `worker` owns; the ownership of locked rows lapses later."""
    given = None if queues is None else list(queues)
    cursor.execute(DISOWN, {"worker": worker, "queues": given, "to": None, "lease": None})


def hand_over(cursor: Cursor, *, queue: str, worker: str, to: str, lease: float) -> bool:
    """Let the worker `to` own a queue of `worker` for `lease` seconds; return whether it does.

    It does not while another session has the queue's row locked.
    """
    cursor.execute(DISOWN, {"worker": worker, "queues": [queue], "to": to, "lease": lease})
    return cursor.fetchone() is not None


# Locks the queue's row first, so that no worker takes the line over before this commits.
HOLD_LINE = """
select date_part('epoch', statement_timestamp()),
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
       pg_current_xact_id()::text::bigint
  from django_mq_queuestate
 where queue = %(queue)s and owner = %(worker)s and owned_until > statement_timestamp()
   for no key update skip locked
"""

# Claims from the head to the first gap, and only while nothing of the queue is in flight. With =,
# the planner may scan the primary key instead of the line. Both scans begin at a mark.
CLAIM_LINE = f"""
with head as materialized (
    select m.id, m.payload::text as payload,
           m.dead_at is null and m.processable_after <= statement_timestamp() {EXCLUDED} as ok
      from django_mq_queuedmessage m
     where (m.queue, m.id) >= (%(queue)s, %(first)s) and m.queue <= %(queue)s and m.ordered
       and (m.dead_at is null or not %(skip_dead)s)
       and not exists (
           select from django_mq_queuedmessage in_flight
            where in_flight.queue = %(queue)s
              and in_flight.leased_until >= to_timestamp(%(lease_mark)s))
       and {is_open("%(queue)s")}
     order by m.queue, m.id
     limit %(limit)s
), locked as materialized (
    select m.id, head.payload, head.n
      from (
        select head.*, row_number() over line as n, bool_and(ok) over line as unbroken
          from head
        window line as (order by id)
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
    select id, payload, (%(claimers)s::text[])[(n - 1) / %(per_claimer)s + 1] as claimer
      from (
        select locked.*, row_number() over line as locked_n,
               sum(octet_length(payload)) over line as total
          from locked
        window line as (order by id)
      ) locked
     where locked_n = n and (n = 1 or total <= %(bytes)s)
)
update django_mq_queuedmessage m
   set attempts = {NEXT_ATTEMPT}, claimed_by = taken.claimer,
       unstarted_claim = {unstarted_claim("taken.claimer")}, blocked_by = null,
       leased_until = statement_timestamp() + make_interval(secs => %(lease)s)
  from taken
 where m.id = any(array[taken.id])
returning {claimed_columns(payload="taken.payload")}
"""


class ClaimedLine(NamedTuple):
    """The claimed rows, in order, and the marks for the next claim of the queue."""

    rows: list[ClaimedRow]
    marks: LineMarks


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
    nonatomic: Sequence[str] = (),
    marks: LineMarks = FRONT,
    from_front: bool = True,
) -> ClaimedLine:
    """Take the first messages of `queue`, up to `limit` and without a gap, if `worker` owns it.

    A head that is delayed, retrying or (unless `skip_dead`) dead blocks the line, and so does any
    message in flight. The caller opens a transaction and commits it at once. The `more_claimers`
    share the rows. Rows in `excluded`, and the rows behind them, are left out. Unless it looks
    `from_front`, it begins at `marks`.
    """
    cursor.execute(HOLD_LINE, {"queue": queue, "worker": worker})
    if (held := cursor.fetchone()) is None:
        return ClaimedLine([], marks)
    before = Snapshot._make(held)
    if before.at < marks.lease:  # the server's clock was set back, and leases end before the mark
        marks = FRONT
    begin = FRONT if from_front else marks
    cursor.execute(
        excluding(CLAIM_LINE, excluded),
        {
            "queue": queue,
            "excluded": array(excluded),
            "claimers": array((claimer, *more_claimers)),
            "per_claimer": -(-limit // (1 + len(more_claimers))),
            "lease": lease,
            "limit": limit,
            "bytes": max_bytes,
            "skip_dead": skip_dead,
            "admitted": admitted,
            "nonatomic": names(nonatomic),
            "first": begin.first,
            "lease_mark": begin.lease,
        },
    )
    rows = [ClaimedRow._make(row) for row in sorted(cursor.fetchall())]
    return ClaimedLine(rows, marks.claimed(rows[0].id, before) if rows else marks)
