"""Read the state of a queue, however many messages wait in it."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.gates import IS_PAUSED
from django_mq.store.queue_names import LANES
from django_mq.store.readers import prepare_to_read

#: Due messages examined per priority: about 5 ms if all of them are behind others of their keys.
WINDOW = 1000

# One probe per priority, so that neither a million due nor a million delayed rows are scanned.
# FOR SHARE skips a row that a claim or a handler has locked, which therefore does not count as due;
# two readers do not hide it from each other. A row behind another of its key is not due either: the
# subquery for the head of a key is memoized, one probe per key. With earlier.key = first.key, the
# planner may scan the primary key (see claim_keyed). `overdue` is read only if nothing is due.
_STATE = f"""
with recursive {LANES}, due as materialized (
    select m.id
      from lane
     cross join lateral (
        select m.id, m.queue, m.handler, m.key, m.expires_at
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.priority = lane.priority
           and {WAITS}
           and m.processable_after <= statement_timestamp()
         order by m.processable_after, m.id
         limit %(window)s
     ) first
      left join lateral (
        select earlier.id
          from django_mq_queuedmessage earlier
         where earlier.queue = first.queue and earlier.handler = first.handler
           and earlier.key >= first.key and earlier.key <= first.key
           and (earlier.dead_at is null or not %(skip_dead)s)
         order by earlier.key, earlier.id
         limit 1
     ) head on true
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = first.id
           and {WAITS}
           and m.processable_after <= statement_timestamp()
        {{locking}}
     ) m
     where (first.expires_at is null or first.expires_at > statement_timestamp())
       and (first.key is null or first.id = head.id)
     limit 1
), lapsed as materialized (
    select m.id
      from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.leased_until <= statement_timestamp()
     order by m.leased_until, m.id
     limit 1
    {{locking}}
), next as (
    select min(soonest.at) as at
      from lane
     cross join lateral (
        select m.processable_after as at
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.priority = lane.priority
           and {WAITS}
           and m.processable_after > statement_timestamp()
         order by m.processable_after
         limit 1
     ) soonest
), lapse as (
    select m.leased_until as at
      from django_mq_queuedmessage m
     where m.queue = %(queue)s and m.leased_until > statement_timestamp()
     order by m.leased_until
     limit 1
), overdue as materialized (
    select count(*) filter (where not first.expired) as n, max(first.ordinal) as most
      from lane
     cross join lateral (
        select coalesce(m.expires_at <= statement_timestamp(), false) as expired,
               row_number() over (order by m.processable_after) as ordinal
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.priority = lane.priority
           and {WAITS}
           and m.processable_after <= statement_timestamp()
         order by m.processable_after
         limit %(window)s + 1
     ) first
), found as (
    select exists (select from due) or exists (select from lapsed) as due
)
select found.due,
       least(next.at, lapse.at),
       not found.due and (
           exists (
               select
                 from django_mq_queuedmessage m
                where m.queue = %(queue)s and m.leased_until <= statement_timestamp())
           or (select overdue.n > 0 from overdue)),
       not found.due and coalesce((select overdue.most > %(window)s from overdue), false),
       statement_timestamp(),
       {IS_PAUSED},
       coalesce(s.backoff_level, 0),
       case when s.backoff_until > statement_timestamp() then s.backoff_until end
  from found
 cross join next
  left join lapse on true
  left join django_mq_queuestate s on s.queue = %(queue)s
"""
STATE = _STATE.format(locking="for share of m skip locked")
#: For read-only logins and servers: a row that another session has locked counts as due.
STATE_UNLOCKED = _STATE.format(locking="")

# The first message of an ordered queue. An expired one counts as dead, which it will be.
_HEAD = """
with head as materialized (
    select m.id, lost.lost, coalesce(m.leased_until, m.processable_after) as at
      from django_mq_queuedmessage m
     cross join lateral (
        select m.dead_at is not null
               or m.leased_until is null and coalesce(m.expires_at <= statement_timestamp(), false)
     ) lost (lost)
     where m.queue >= %(queue)s and m.queue <= %(queue)s and m.ordered
       and not (lost.lost and %(skip_dead)s)
     order by m.queue, m.id
     limit 1
), free as materialized (
    select m.id
      from head
     cross join lateral (
        select m.id from django_mq_queuedmessage m where m.id = head.id {locking}
     ) m
)
select head.lost, head.at, head.at <= statement_timestamp(), exists (select from free)
  from head
"""
HEAD = _HEAD.format(locking="for share of m skip locked")
HEAD_UNLOCKED = _HEAD.format(locking="")


class QueueSnapshot(NamedTuple):
    """The state of a queue at `now`, by the database's clock.

    `due`: a message can be claimed. `next_at`: the earliest due or lapse time in the future. The
    other two are set unless `due`. `taken`: a message is due or lapsed, though another session may
    have it locked. `more`: in some priority, more due messages follow the examined ones.
    """

    due: bool
    next_at: datetime | None
    taken: bool
    more: bool
    now: datetime
    paused: bool
    backoff_level: int
    backoff_until: datetime | None


def state(cursor: Cursor, *, queue: str, skip_dead: bool, ordered: bool = False) -> QueueSnapshot:
    """Return the state of `queue`; with `skip_dead`, a dead head does not block its key.

    Examines up to `WINDOW` due messages per priority. In an `ordered` queue, the first message
    alone decides; an ordered queue with no message in line yet is treated like any other. Locks at
    most three rows until the transaction ends: roll back to a savepoint to release them.
    """
    locks = prepare_to_read(cursor)
    asked = {"queue": queue, "queues": [queue], "skip_dead": skip_dead, "window": WINDOW}
    cursor.execute(STATE if locks else STATE_UNLOCKED, asked)
    found = QueueSnapshot._make(cursor.fetchone())
    if ordered:
        cursor.execute(HEAD if locks else HEAD_UNLOCKED, asked)
        if (head := cursor.fetchone()) is not None:
            return _of_line(found, *head)
    return found


def _of_line(
    found: QueueSnapshot, is_lost: bool, at: datetime, is_due: bool, is_free: bool
) -> QueueSnapshot:
    """Return the state of an ordered queue, by the first message of its line."""
    next_at = None if is_lost or is_due else at
    is_due = is_due and not is_lost
    return found._replace(
        due=is_due and is_free, next_at=next_at, taken=is_due and not is_free, more=False
    )
