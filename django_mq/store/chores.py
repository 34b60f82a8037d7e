"""Chores: small guarded statements that any worker may run at any time, in small pieces.

Each chore limits the rows that it scans, not only the rows that it changes. A scan that stops early
returns the position from which the next scan resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.queue_names import CHORES_ROW
from django_mq.store.readers import NO_JIT

# One worker of the fleet takes the turn; the others see that it is taken. There is no leader, and
# no lock outlives this statement. A time in the future was not written by this clock and is
# ignored.
TAKE_TURN = f"""
insert into django_mq_queuestate as s (queue, chores_ran_at)
values ('{CHORES_ROW}', statement_timestamp())
    on conflict (queue) do update
   set chores_ran_at = statement_timestamp()
 where s.chores_ran_at is null
    or s.chores_ran_at <= statement_timestamp() - make_interval(secs => %(every)s)
    or s.chores_ran_at > statement_timestamp() + make_interval(secs => %(every)s)
returning coalesce(chores_resume, '{{}}')::text
"""


def take_turn(cursor: Cursor, *, every: float) -> dict[str, Any] | None:
    """Take the fleet's turn, given once per `every` seconds; return None if it is already taken.

    Returns the positions that `resume_at()` stored in the last turn, by the name of the scan.
    """
    cursor.execute(TAKE_TURN, {"every": every})
    row = cursor.fetchone()
    return None if row is None else _positions(row[0])


def _positions(text: str) -> dict[str, Any]:
    """Return the stored positions; none if another program has written something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # too many digits, or too deep for this interpreter
        return {}
    return found if isinstance(found, dict) else {}


RESUME_AT = f"""
update django_mq_queuestate set chores_resume = %(resume)s::jsonb where queue = '{CHORES_ROW}'
"""


def resume_at(cursor: Cursor, positions: Mapping[str, Any]) -> None:
    """Store where each scan stopped, for whichever worker takes the next turn."""
    cursor.execute(RESUME_AT, {"resume": json.dumps(positions)})


def _next_queue(table: str, condition: str) -> str:
    return f"""(select m.queue
               from django_mq_queuedmessage m
              where {condition} and m.queue > {table}
              order by m.queue
              limit 1)"""


def _next_queues(*conditions: str) -> str:
    """Return a statement that steps from queue to queue, using the index of each condition."""

    def following(queue: str) -> str:
        return f"least({', '.join(_next_queue(queue, each) for each in conditions)})"

    return f"""
with recursive q (queue, n) as (
    select {following("%(after)s::text")}, 1
    union all
    select {following("q.queue")}, q.n + 1
      from q
     where q.queue is not null and q.n < %(limit)s
)
select queue from q where queue is not null
"""


WAITING_QUEUES = _next_queues(WAITS, "m.key is not null")


def waiting_queues(cursor: Cursor, *, after: str, limit: int) -> list[str]:
    """Return the next `limit` queues after `after` in which messages may wait, in order."""
    cursor.execute(WAITING_QUEUES, {"after": after, "limit": limit})
    return [row[0] for row in cursor.fetchall()]


# A message waits if no worker holds it and it is not dead. Both counts stop at the limit and read
# in the order of their index. No index finds blocked rows by queue, so the scan covers keyed rows.
WAITING = f"""
select asked.queue, waiting.n + blocked.n
  from unnest(%(queues)s::text[], %(limits)s::bigint[]) as asked (queue, most)
 cross join lateral (
    select count(*) as n
      from (
        select
          from django_mq_queuedmessage m
         where m.queue = asked.queue
           and {WAITS}
         order by m.priority desc, m.processable_after, m.id
         limit asked.most
      ) m
 ) waiting
 cross join lateral (
    select count(*) filter (where m.blocked_by is not null
                              and m.leased_until is null and m.dead_at is null) as n
      from (
        select m.blocked_by, m.leased_until, m.dead_at
          from django_mq_queuedmessage m
         where m.queue = asked.queue and m.key is not null
         order by m.handler, m.key, m.id
         limit asked.most
      ) m
 ) blocked
"""


def count_with_blocked(cursor: Cursor, limits: Mapping[str, int]) -> dict[str, int]:
    """Return how many messages wait in each queue, blocked ones included.

    A count is exact up to the limit of its queue; beyond that, it is at least the limit. If a queue
    has more keyed messages than its limit, blocked ones may be left out. Call it in a transaction:
    it changes settings of that transaction.
    """
    cursor.execute(NO_JIT)
    cursor.execute(WAITING, {"queues": list(limits), "limits": list(limits.values())})
    return dict(cursor.fetchall())


# The worker that changes the row warns for the whole fleet.
TAKE_WARNING = """
insert into django_mq_queuestate as s (queue, warned_at)
values (%(queue)s, statement_timestamp())
    on conflict (queue) do update
   set warned_at = statement_timestamp()
 where s.warned_at is null
    or s.warned_at <= statement_timestamp() - make_interval(secs => %(every)s)
    or s.warned_at > statement_timestamp() + make_interval(secs => %(every)s)
returning queue
"""


def take_warning(cursor: Cursor, *, queue: str, every: float) -> bool:
    """Return whether this worker is to warn about `queue`: true once per `every` seconds."""
    cursor.execute(TAKE_WARNING, {"queue": queue, "every": every})
    return cursor.fetchone() is not None


DEAD_QUEUES = _next_queues("m.dead_at is not null")


def dead_queues(cursor: Cursor, *, after: str, limit: int) -> list[str]:
    """Return the next `limit` queues after `after` that have dead letters, in order."""
    cursor.execute(DEAD_QUEUES, {"after": after, "limit": limit})
    return [row[0] for row in cursor.fetchall()]


PRUNE_WORKERS = """
with walked as materialized (
    select w.id, w.last_seen
      from django_mq_workerheartbeat w
     where w.id > %(after)s::text
     order by w.id
     limit %(limit)s
), removed as (
    delete from django_mq_workerheartbeat
     where id = any(array(
        select w.id
          from django_mq_workerheartbeat w
         where w.id = any(array(select walked.id from walked))
           and w.last_seen < statement_timestamp() - make_interval(secs => %(older_than)s)
           for update skip locked))
)
select max(id) from walked having count(*) >= %(limit)s
"""


def prune_workers(
    cursor: Cursor, *, older_than: float, after: str = "", limit: int = 1000
) -> str | None:
    """Delete workers silent for `older_than` seconds, among the next `limit` after `after`.

    Returns the last id it looked at, None if there are no more.
    """
    cursor.execute(PRUNE_WORKERS, {"older_than": older_than, "after": after, "limit": limit})
    row = cursor.fetchone()
    return None if row is None else str(row[0])
