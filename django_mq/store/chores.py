"""Chores: small guarded statements that any worker may run at any time, in small pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from django_mq.messages import ClaimedRow
from django_mq.store.census import NO_JIT
from django_mq.store.claimed import claimed_columns

if TYPE_CHECKING:
    from django_mq.store import Cursor

# One worker of the fleet gets the turn; the others see that it was taken. No leader, no lock
# beyond this statement. The row belongs to no queue that anybody can name: `:` alone.
TAKE_TURN = """
insert into django_mq_queuestate as s (queue, chores_ran_at)
values (':', statement_timestamp())
    on conflict (queue) do update
   set chores_ran_at = statement_timestamp()
 where s.chores_ran_at is null
    or s.chores_ran_at <= statement_timestamp() - make_interval(secs => %(every)s)
returning queue
"""


def take_turn(cursor: Cursor, *, every: float) -> bool:
    """Say whether this worker is the one to run the chores: once in `every` seconds."""
    cursor.execute(TAKE_TURN, {"every": every})
    return cursor.fetchone() is not None


# MATERIALIZED: a plan that scans it again finds, by SKIP LOCKED, other rows than before.
EXPIRE = f"""
with expired as materialized (
    select m.id
      from django_mq_queuedmessage m
     where m.expires_at <= statement_timestamp() and m.dead_at is null
       and m.leased_until is null
     order by m.expires_at
     limit %(limit)s
       for no key update of m skip locked
)
update django_mq_queuedmessage m
   set dead_at = statement_timestamp(), dead_reason = 'expired', blocked_by = null
 where m.id = any(array(select id from expired))
returning {claimed_columns()}
"""  # noqa: S608  (made of our own texts)


def expire(cursor: Cursor, *, limit: int) -> list[ClaimedRow]:
    """Dead-letter waiting messages that expired; return them."""
    cursor.execute(EXPIRE, {"limit": limit})
    return [ClaimedRow._make(row) for row in cursor.fetchall()]


# Waiting is what no worker holds and is not dead. Both counts stop at the limit, and ask for the
# order of their index. Blocked rows have no index that knows the queue: keyed rows are walked.
WAITING = """
select asked.queue, waiting.n + blocked.n
  from unnest(%(queues)s::text[], %(limits)s::bigint[]) as asked (queue, most)
 cross join lateral (
    select count(*) as n
      from (
        select
          from django_mq_queuedmessage m
         where m.queue = asked.queue
           and m.leased_until is null and m.blocked_by is null and m.dead_at is null
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


def count_waiting(cursor: Cursor, limits: Mapping[str, int]) -> dict[str, int]:
    """Return how many messages wait in each queue; with more than its limit, at least so many.

    Of a queue with more than its limit of keyed messages, blocked ones may be left out. Call it
    in a transaction: it sets what holds for that one.
    """
    cursor.execute(NO_JIT)
    cursor.execute(WAITING, {"queues": list(limits), "limits": list(limits.values())})
    return dict(cursor.fetchall())


# Whoever gets the row says it, for the whole fleet.
TAKE_WARNING = """
insert into django_mq_queuestate as s (queue, warned_at)
values (%(queue)s, statement_timestamp())
    on conflict (queue) do update
   set warned_at = statement_timestamp()
 where s.warned_at is null
    or s.warned_at <= statement_timestamp() - make_interval(secs => %(every)s)
returning queue
"""


def take_warning(cursor: Cursor, *, queue: str, every: float) -> bool:
    """Say whether this worker is the one to warn of `queue`: once in `every` seconds."""
    cursor.execute(TAKE_WARNING, {"queue": queue, "every": every})
    return cursor.fetchone() is not None


FORGET_ATTEMPTS = """
delete from django_mq_failedattempt
 where id = any(array(
    select id from django_mq_failedattempt
     where ended_at < statement_timestamp() - make_interval(secs => %(older_than)s)
     order by ended_at
     limit %(limit)s))
"""


def forget_attempts(cursor: Cursor, *, older_than: float, limit: int) -> None:
    """Remove failed attempts that ended more than `older_than` seconds ago."""
    cursor.execute(FORGET_ATTEMPTS, {"older_than": older_than, "limit": limit})


FORGET_RESULTS = """
delete from django_mq_result
 where message_id = any(array(
    select message_id from django_mq_result
     where created_at < statement_timestamp() - make_interval(secs => %(older_than)s)
     order by created_at
     limit %(limit)s))
returning message_id
"""


def forget_results(cursor: Cursor, *, older_than: float, limit: int) -> int:
    """Remove results that are older than `older_than` seconds; return how many went."""
    cursor.execute(FORGET_RESULTS, {"older_than": older_than, "limit": limit})
    return len(cursor.fetchall())


FORGET_DEAD = """
delete from django_mq_queuedmessage
 where id = any(array(
    select id from django_mq_queuedmessage
     where queue = %(queue)s
       and dead_at < statement_timestamp() - make_interval(secs => %(older_than)s)
     order by dead_at, id
     limit %(limit)s
       for update skip locked))
returning id
"""


def forget_dead(cursor: Cursor, *, queue: str, older_than: float, limit: int) -> int:
    """Remove dead letters of `queue` that died more than `older_than` seconds ago."""
    cursor.execute(FORGET_DEAD, {"queue": queue, "older_than": older_than, "limit": limit})
    return len(cursor.fetchall())


DEAD_QUEUES = """
with recursive q as (
    (select queue from django_mq_queuedmessage where dead_at is not null order by queue limit 1)
    union all
    select (select m.queue from django_mq_queuedmessage m
             where m.dead_at is not null and m.queue > q.queue
             order by m.queue limit 1)
      from q
     where q.queue is not null
)
select queue from q where queue is not null
"""


def dead_queues(cursor: Cursor) -> list[str]:
    """Return the queues that have dead letters."""
    cursor.execute(DEAD_QUEUES)
    return [row[0] for row in cursor.fetchall()]


FORGET_WORKERS = """
delete from django_mq_workerheartbeat
 where last_seen < statement_timestamp() - make_interval(secs => %(older_than)s)
"""


def forget_workers(cursor: Cursor, *, older_than: float) -> None:
    """Strike workers that were not heard of for `older_than` seconds."""
    cursor.execute(FORGET_WORKERS, {"older_than": older_than})
