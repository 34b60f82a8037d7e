"""The results of Django tasks: kept for the requested time, with everything that they show.

A request's reply is its value or its error. The result of a task also shows its arguments, times,
workers and errors, even when its message is long gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django_mq.messages import ClaimedRow
from django_mq.policy.column_bounds import MAX_SPAN_SECONDS
from django_mq.policy.routing import TASKS
from django_mq.store import Cursor, arrays_of
from django_mq.store.results import UNANSWERED, Reply

#: The metadata in which a task carries its options.
OPTIONS = "mq.task"
#: The maximum number of failed attempts that are kept with a result: the last ones.
MAX_KEPT_ATTEMPTS = 100


def _failed(id: str) -> str:
    """Return the failed attempts of message `id`, oldest first, as a JSON array."""
    return f"""coalesce((
        select jsonb_agg(jsonb_build_object(
                   'worker', f.worker,
                   'started', extract(epoch from coalesce(f.started_at, f.ended_at)),
                   'error_class', f.error_class,
                   'traceback', coalesce(nullif(f.traceback, ''), f.error_text))
               order by f.attempt, f.id)
          from (select *
                  from django_mq_failedattempt f
                 where f.message_id = {id}
                 order by f.attempt desc, f.id desc
                 limit {MAX_KEPT_ATTEMPTS}) f), '[]')"""


def _keep_until(metadata: str) -> str:
    """Return the SQL for the time until which a result is kept; null: as the setting says."""
    number = f"({metadata} #> '{{{OPTIONS},retention}}')"
    return f"""case jsonb_typeof({number}) when 'number' then
               statement_timestamp() + make_interval(secs =>
                   least(greatest({number}::numeric, 0), {MAX_SPAN_SECONDS})::float8) end"""


_COLUMNS = "queue, priority, payload, metadata, enqueued_at, attempts, keep_until"
_REPLACE = (
    "on conflict (message_id) do update set created_at = statement_timestamp(), "
    + ", ".join(
        f"{name} = excluded.{name}"
        for name in ("handler", "value", "error_class", "error_text", *_COLUMNS.split(", "))
    )
)


class KeptResult(NamedTuple):
    """A task's reply, the row that it answers, and how long its attempt ran if it succeeded."""

    reply: Reply
    row: ClaimedRow
    seconds: float | None


KEEP = f"""
insert into django_mq_result (message_id, handler, value, error_class, error_text, {_COLUMNS})
select k.id, k.handler, k.value::jsonb, k.error_class, k.error_text,
       k.queue, k.priority, k.payload::jsonb, k.metadata::jsonb, to_timestamp(k.created),
       {_failed("k.id")} || case when k.seconds is null then '[]' else
           jsonb_build_array(jsonb_build_object(
               'worker', split_part(k.claimer, ':', 1),
               'started', extract(epoch from statement_timestamp()) - k.seconds)) end,
       {_keep_until("k.metadata::jsonb")}
  from unnest(%(id)s::bigint[], %(handler)s::text[], %(value)s::text[],
              %(error_class)s::text[], %(error_text)s::text[],
              %(queue)s::text[], %(priority)s::int[], %(payload)s::text[],
              %(metadata)s::text[], %(created)s::float8[], %(claimed_by)s::text[],
              %(seconds)s::float8[])
       as k (id, handler, value, error_class, error_text, queue, priority, payload, metadata,
             created, claimer, seconds)
{_REPLACE}
"""


def keep(cursor: Cursor, results: Sequence[KeptResult]) -> None:
    """Store the results of tasks; their failed attempts are already recorded."""
    fields = arrays_of(KeptResult, results)
    rows, replies = arrays_of(ClaimedRow, fields["row"]), arrays_of(Reply, fields["reply"])
    cursor.execute(KEEP, {**fields, **rows, **replies})


# Cancelling requires the right to read payloads only if there are tasks to cancel, so a separate
# statement looks for them.
TASKS_AMONG = f"""
select m.id
  from ({{ids}}) asked (id)
 cross join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.id = asked.id and m.leased_until is null and m.wants_result
       and starts_with(m.type, '{TASKS}')
       and (%(type)s::text is null or m.type = %(type)s)
       and (%(unique_id)s::text is null or m.unique_id = %(unique_id)s)
    offset 0
 ) m
"""
IDS = "select unnest(%(ids)s::bigint[])"

KEEP_REMOVED = f"""
with removed as materialized (
    select m.id, m.handler, m.queue, m.priority, m.payload, m.metadata, m.created_at
      from django_mq_queuedmessage m
     where m.id = any(%(tasks)s::bigint[]) and m.leased_until is null
       and case when m.dead_at is null then %(waiting)s else %(dead)s end
       for update skip locked
)
insert into django_mq_result (message_id, handler, error_class, error_text, {_COLUMNS})
select r.id, r.handler, '{UNANSWERED}', %(reason)s, r.queue, r.priority, r.payload, r.metadata,
       r.created_at, {_failed("r.id")}, {_keep_until("r.metadata")}
  from removed r
{_REPLACE}
returning message_id
"""


def keep_removed(
    cursor: Cursor,
    params: Mapping[str, object],
    *,
    waiting: bool,
    dead: bool,
    reason: str,
    asked: str = IDS,
) -> list[int]:
    """Store results of the tasks among messages that are about to be removed; return their ids.

    The tasks stay locked; the caller has to remove them in the same transaction. `asked` is a query
    for ids with `params`; a `type` and a `unique_id` in `params` narrow it. Among these, the tasks
    that wait (if `waiting`) or are dead (if `dead`) end with `reason`. A new result replaces
    an earlier one.
    """
    params = {"type": None, "unique_id": None, **params}
    cursor.execute(TASKS_AMONG.format(ids=asked), params)
    tasks = [row[0] for row in cursor.fetchall()]
    if not tasks:
        return []
    values = {"tasks": tasks, "waiting": waiting, "dead": dead, "reason": reason}
    cursor.execute(KEEP_REMOVED, values)
    return [row[0] for row in cursor.fetchall()]


#: A condition on messages `m`: not a task, or a task whose result `keep_removed()` kept.
IS_KEPT = f"""(not m.wants_result or not starts_with(m.type, '{TASKS}')
                or m.id = any(%(kept)s::bigint[]))"""


# A heartbeat may still list an earlier attempt of the message, which ended before this one began.
_STARTED = f"""(
    select extract(epoch from began)::float8
      from (select case jsonb_typeof(w.ran -> m.id::text) when 'number' then
                        w.last_seen - make_interval(secs =>
                            least(greatest((w.ran -> m.id::text)::numeric, 0),
                                  {MAX_SPAN_SECONDS})::float8)
                   end as began, w.last_seen
              from django_mq_workerheartbeat w
             where w.id = split_part(m.claimed_by, ':', 1)) listed
     where began < last_seen
       and not exists (select from django_mq_failedattempt f
                        where f.message_id = m.id and f.ended_at > began))"""

FIND = f"""
select 0 as ordinal, m.handler, m.queue, m.priority, m.payload::text, m.metadata::text,
       extract(epoch from m.created_at)::float8, {_failed("m.id")}::text, m.attempts,
       extract(epoch from m.dead_at)::float8, null,
       case when m.dead_at is null then ''
            else coalesce(r.error_class,
                          case when m.dead_reason = 'expired'
                                 or starts_with(m.dead_reason, 'held for too long')
                               then '{UNANSWERED}' else '' end) end,
       m.dead_reason, split_part(m.claimed_by, ':', 1),
       extract(epoch from m.leased_until)::float8, {_STARTED},
       case when m.attempts = 0 and m.dead_at is null and m.held_since is null then
            extract(epoch from m.processable_after)::float8 end
  from django_mq_queuedmessage m
  left join django_mq_result r on r.message_id = m.id
 where m.id = %(id)s and starts_with(m.type, '{TASKS}') and m.wants_result
union all
select 1, r.handler, r.queue, coalesce(r.priority, 0), r.payload::text,
       coalesce(r.metadata, '{{}}')::text,
       extract(epoch from coalesce(r.enqueued_at, r.created_at))::float8,
       coalesce(r.attempts, '[]')::text, coalesce(jsonb_array_length(r.attempts), 0),
       extract(epoch from r.created_at)::float8, r.value::text, r.error_class, r.error_text,
       null, null, null, null
  from django_mq_result r
 where r.message_id = %(id)s and r.payload is not null
 order by ordinal
 limit 1
"""


class StoredTask(NamedTuple):
    """A task as the tables have it; `payload`, `metadata`, `attempts` and `value` are JSON text.

    Times are seconds since 1970. `stored`: its message is still in its queue. `ended` is None while
    the task waits or runs. For a claimed message, `worker` and `leased_until` describe the claim
    (else None), and `started` is when the attempt began: None until the worker's next heartbeat.
    `due`: when the first attempt may start; None from then on, and while the task is held.
    `error_class` is empty unless the result is a failure: then it is the class of the last error,
    or `results.UNANSWERED` with the reason in `error_text`.
    """

    stored: bool
    handler: str
    queue: str
    priority: int
    payload: str
    metadata: str
    enqueued: float
    attempts: str
    used: int
    ended: float | None
    value: str | None
    error_class: str
    error_text: str
    worker: str | None
    leased_until: float | None
    started: float | None
    due: float | None


def find(cursor: Cursor, id: int) -> StoredTask | None:
    """Return task `id` from its message, else from its result; None if neither exists."""
    cursor.execute(FIND, {"id": id})
    row = cursor.fetchone()
    return None if row is None else StoredTask(row[0] == 0, *row[1:])


ATTEMPTS = f"select {_failed('%(id)s')}::text"


def failed_attempts(cursor: Cursor, id: int) -> str:
    """Return the failed attempts of message `id`, oldest first, as a JSON array."""
    cursor.execute(ATTEMPTS, {"id": id})
    return str(cursor.fetchone()[0])
