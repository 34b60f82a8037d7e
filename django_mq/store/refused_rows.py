"""Find the rows whose claim the server refuses: a trigger, a policy or a constraint may raise.

A claim of several rows is one statement, which fails as a whole and does not say for which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_mq.store import array
from django_mq.store.claim import OPEN_LANES, lane_columns
from django_mq.store.claimed_row import NEXT_ATTEMPT
from django_mq.store.conditions import WAITS

if TYPE_CHECKING:
    from django_mq.store import Cursor
    from django_mq.store.claim import Lane

#: The minimum number of rows examined per key: a claim shares its limit among the keys.
MIN_ROWS_PER_KEY = 20

# The rows of a lane, those of their keys, and the line of an ordered queue: a claim of any kind
# changes only these.
WAITING = f"""
with lane as materialized ({OPEN_LANES}), seen as materialized (
    select row_.*
      from lane
     cross join lateral (
        select m.id, m.queue, m.handler, m.key
          from django_mq_queuedmessage m
         where m.queue = lane.queue and m.priority = lane.priority
           and {WAITS}
           and m.processable_after <= statement_timestamp()
           and m.id <> all(%(excluded)s::bigint[])
         order by m.processable_after, m.id
         limit %(limit)s
     ) row_
     limit %(limit)s
), line as materialized (
    select distinct queue, handler, key from seen where key is not null
), keyed as (
    select m.id, m.queue
      from line
     cross join lateral (
        select m.id, m.queue
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and m.key >= line.key and m.key <= line.key
           and m.leased_until is null and m.dead_at is null
           and m.id <> all(%(excluded)s::bigint[])
         order by m.key, m.id
         limit greatest({MIN_ROWS_PER_KEY}, (select %(limit)s / count(*) + 1 from line))
     ) m
), ordered as (
    select m.id, m.queue
      from (select distinct queue from lane) whole
     cross join lateral (
        select m.id, m.queue
          from django_mq_queuedmessage m
         where m.queue >= whole.queue and m.queue <= whole.queue and m.ordered
           and m.leased_until is null and m.dead_at is null
           and m.id <> all(%(excluded)s::bigint[])
         order by m.queue, m.id
         limit %(limit)s
     ) m
)
select id, queue from seen
 union
select id, queue from keyed
 union
select id, queue from ordered
"""

LAPSED = """
select m.id, m.queue
  from unnest(%(queues)s::text[]) as asked (queue)
 cross join lateral (
    select m.id, m.queue
      from django_mq_queuedmessage m
     where m.queue = asked.queue and m.leased_until <= statement_timestamp()
       and m.id <> all(%(excluded)s::bigint[])
     order by m.leased_until, m.id
     limit %(limit)s
 ) m
 limit %(limit)s
"""


def waiting(
    cursor: Cursor, *, lanes: Sequence[Lane], limit: int, admitted: bool, excluded: Sequence[int]
) -> dict[int, str]:
    """Return the rows that a claim of up to `limit` messages may take or pass: queues by id."""
    params = {
        **lane_columns(lanes),
        "limit": limit,
        "admitted": admitted,
        "excluded": array(excluded),
    }
    cursor.execute(WAITING, params)
    return dict(cursor.fetchall())


def lapsed(
    cursor: Cursor, *, queues: Sequence[str], limit: int, excluded: Sequence[int]
) -> dict[int, str]:
    """Return up to `limit` rows whose lease has lapsed: queues by id."""
    cursor.execute(LAPSED, {"queues": list(queues), "limit": limit, "excluded": array(excluded)})
    return dict(cursor.fetchall())


# The attempt that a take-over of a lapsed row records.
RECORD = """
insert into django_mq_failedattempt
       (message_id, queue, type, handler, attempt, worker, error_class, error_text, traceback)
select m.id, m.queue, m.type, m.handler, m.attempts, split_part(m.claimed_by, ':', 1),
       'WorkerVanished', 'the lease lapsed', ''
  from django_mq_queuedmessage m
 where m.id = any(%(ids)s::bigint[]) and m.leased_until is not null
"""

# The columns that a claim, or the take-over of a lapsed row, sets.
TRY = f"""
update django_mq_queuedmessage m
   set attempts = case when taken.over then m.attempts else {NEXT_ATTEMPT} end,
       claimed_by = case when taken.over then null else %(claimer)s end,
       unstarted_claim = null,
       leased_until = case when taken.over then null
                           else statement_timestamp() + interval '30 s' end,
       blocked_by = null,
       suspect = m.suspect or taken.lapsed,
       last_error = case when taken.lapsed then 'WorkerVanished: the lease lapsed'
                         else m.last_error end,
       dead_at = case when taken.over then statement_timestamp() end,
       dead_reason = case when taken.over then 'exhausted' else '' end
  from (
    select m.id, m.leased_until is not null as lapsed,
           m.leased_until is not null and m.attempts >= m.max_attempts as over
      from unnest(%(ids)s::bigint[]) as asked (id)
     cross join lateral (
        select m.id, m.leased_until, m.attempts, m.max_attempts
          from django_mq_queuedmessage m
         where m.id = asked.id and m.dead_at is null
           for no key update skip locked
     ) m
  ) taken
 where m.id = any(array[taken.id])
"""


def try_claim(cursor: Cursor, ids: Sequence[int], *, records: bool = True) -> None:
    """Claim the rows `ids`, without their order and limits; the caller rolls it back.

    Raises the server's error if it refuses one of them, even if it would do so only at COMMIT. Rows
    that another session has locked are skipped. `records`: the claim also records the attempts that
    vanished, for which some logins have no right.
    """
    if records:
        cursor.execute(RECORD, {"ids": array(ids)})
    cursor.execute(TRY, {"ids": array(ids), "claimer": "try:0"})
    cursor.execute("set constraints all immediate")
