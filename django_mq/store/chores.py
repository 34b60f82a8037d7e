"""Chores: small guarded statements that any worker may run at any time, in small pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mq.messages import ClaimedRow

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


EXPIRE = """
update django_mq_queuedmessage m
   set dead_at = statement_timestamp(), dead_reason = 'expired', blocked_by = null
  from (
    select m.id
      from django_mq_queuedmessage m
     where m.expires_at <= statement_timestamp() and m.dead_at is null
       and m.leased_until is null
     order by m.expires_at
     limit %(limit)s
       for no key update of m skip locked
  ) expired
 where m.id = expired.id
returning m.id, m.queue, m.type, m.handler, m.schema_version, m.payload::text, m.metadata::text,
          m.priority, m.key, m.attempts, m.max_attempts, m.retry::text, '',
          m.wants_result, m.suspect,
          extract(epoch from statement_timestamp() - m.held_since)::float8,
          m.created_at, statement_timestamp(), m.unique_id, m.ordered
"""


def expire(cursor: Cursor, *, limit: int) -> list[ClaimedRow]:
    """Dead-letter waiting messages that expired; return them."""
    cursor.execute(EXPIRE, {"limit": limit})
    return [ClaimedRow._make(row) for row in cursor.fetchall()]


FORGET_ATTEMPTS = """
delete from django_mq_failedattempt
 where id in (
    select id from django_mq_failedattempt
     where ended_at < statement_timestamp() - make_interval(secs => %(older_than)s)
     order by ended_at
     limit %(limit)s)
"""


def forget_attempts(cursor: Cursor, *, older_than: float, limit: int) -> None:
    """Remove failed attempts that ended more than `older_than` seconds ago."""
    cursor.execute(FORGET_ATTEMPTS, {"older_than": older_than, "limit": limit})


FORGET_RESULTS = """
delete from django_mq_result
 where message_id in (
    select message_id from django_mq_result
     where created_at < statement_timestamp() - make_interval(secs => %(older_than)s)
     order by created_at
     limit %(limit)s)
"""


def forget_results(cursor: Cursor, *, older_than: float, limit: int) -> None:
    """Remove results that are older than `older_than` seconds."""
    cursor.execute(FORGET_RESULTS, {"older_than": older_than, "limit": limit})


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
