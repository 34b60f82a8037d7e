"""Renew leases, and record which worker processes are alive."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from django_mq.messages import Fence
from django_mq.store import LOCK_SKIPPING, Cursor, fence_columns, fenced, literals
from django_mq.store.limits import Limits, begin
from django_mq.store.queue_names import CHORES_ROW


def _extend(lock: str, *, returning: str, starts: bool) -> str:
    """Return the statement that extends leases; `lock` is the locking clause for their rows.

    If it `starts` the handlers, their messages are no longer unstarted.
    """
    return f"""
update django_mq_queuedmessage
   set {"unstarted_claim = null, " if starts else ""}leased_until = greatest(
           leased_until, statement_timestamp() + make_interval(secs => %(lease)s))
 where id = any(array(
    select m.id
      from {fenced(last=lock)}))
returning {returning}
"""


# SKIP LOCKED: a row needs no lease while its own slice has it locked.
RENEW = _extend(LOCK_SKIPPING, returning="id", starts=False)


def renew(cursor: Cursor, fences: Sequence[Fence], *, lease: float) -> set[int]:
    """Extend the leases of `fences` to `lease` seconds from now; never shorten one.

    Returns the ids extended; the others are no longer ours, or are locked.
    """
    cursor.execute(RENEW, {**fence_columns(fences), "lease": lease})
    return {row[0] for row in cursor.fetchall()}


_EXPIRED = "coalesce(expires_at <= statement_timestamp(), false)"

# These messages run outside transactions, so mostly only a renewal locks them, briefly. But an
# operator may do so for an hour, and the next messages must not wait for that.
START, START_SKIPPING = (
    _extend(lock, returning=f"id, {_EXPIRED}", starts=True)
    for lock in ("for no key update", LOCK_SKIPPING)
)


def start(
    cursor: Cursor, fences: Sequence[Fence], *, lease: float, waits: bool = True
) -> dict[int, bool]:
    """Give messages a full lease before their handlers run outside a transaction.

    Returns the ids that are still ours, each with whether the message has expired. Unless it
    `waits`, it leaves out rows that another session has locked.
    """
    statement = START if waits else START_SKIPPING
    cursor.execute(statement, {**fence_columns(fences), "lease": lease})
    return dict(cursor.fetchall())


def start_alone(fences: Sequence[Fence], *, lease: float) -> str:
    """Return the query of `start()`, in a transaction of the worker's, for the simple protocol.

    It runs at READ COMMITTED, whatever level the handlers' connection has: no serialization
    conflict can refuse it. It does not wait for locked rows.
    """
    start = START_SKIPPING % literals({**fence_columns(fences), "lease": lease})
    return f"{begin(Limits())}; {start}; commit"


def parse_start_result(rows: Sequence[Sequence[bytes | None]]) -> dict[int, bool]:
    """Return the result of `start_alone()` in the form of `start()`."""
    return {int(id or 0): expired == b"t" for id, expired in rows}


class Command(NamedTuple):
    """A command to a worker about a message: `action` is `stop` or `stack`.

    Without a message it is about the worker: `quiet`, `resume` or `leave`.
    """

    id: int
    message_id: int | None
    attempt: int | None
    action: str
    by: str


class Capacity(NamedTuple):
    """The threads and slots of a worker process, and how many were in use on average.

    None: not known.
    """

    threads: int | None = None
    threads_used: float | None = None
    slots: int | None = None
    slots_used: float | None = None


class HeartbeatReply(NamedTuple):
    """The server's answer to a heartbeat.

    `since_chores`: seconds since the fleet last did its chores, None if it never did. `now`: the
    time in seconds since 1970. Not `stored`: another session has the row of the heartbeat locked.
    """

    since_chores: float | None
    now: float
    commands: Sequence[Command] = ()
    stored: bool = True


# A locked row is skipped: the renewals come next on the same connection and must not wait.
HEARTBEAT = f"""
with known as materialized (
    select id from django_mq_workerheartbeat where id = %(worker)s
), free as materialized (
    select id from django_mq_workerheartbeat where id = %(worker)s for no key update skip locked
), moved as (
    update django_mq_workerheartbeat
       set last_seen = statement_timestamp(), wakeup = %(wakeup)s, draining = %(draining)s,
           quiet = %(quiet)s, running = %(running)s::jsonb, ran = %(ran)s::jsonb,
           timings = %(timings)s::jsonb, threads = %(threads)s::int,
           threads_used = %(threads_used)s::float8, slots = %(slots)s::int,
           slots_used = %(slots_used)s::float8
     where id = any(array(select id from free))
    returning id
), added as (
    insert into django_mq_workerheartbeat
           (id, queues, host, pid, version, wakeup, draining, quiet, running, ran, timings,
            threads, threads_used, slots, slots_used)
    select %(worker)s, %(queues)s::jsonb, %(host)s, %(pid)s::int, %(version)s, %(wakeup)s,
           %(draining)s, %(quiet)s, %(running)s::jsonb, %(ran)s::jsonb, %(timings)s::jsonb,
           %(threads)s::int, %(threads_used)s::float8, %(slots)s::int, %(slots_used)s::float8
     where not exists (select from known)
        on conflict (id) do nothing
    returning id
), taken as (
    update django_mq_workercommand
       set taken_at = statement_timestamp()
     where worker = %(worker)s and taken_at is null
    returning id, message_id, attempt, action, asked_by
)
select extract(epoch from statement_timestamp() - s.chores_ran_at)::float8,
       extract(epoch from statement_timestamp())::float8,
       (select jsonb_agg(jsonb_build_array(id, message_id, attempt, action, asked_by) order by id)
          from taken),
       exists (select from moved) or exists (select from added)
  from (select) one
  left join django_mq_queuestate s on s.queue = '{CHORES_ROW}'
"""


def record_heartbeat(
    cursor: Cursor,
    *,
    worker: str,
    queues: Sequence[str],
    host: str,
    pid: int,
    version: str,
    wakeup: str,
    draining: bool,
    quiet: bool = False,
    running: Mapping[int, float],
    unrenewed: Collection[int] = (),
    timings: Mapping[str, Any],
    capacity: Capacity,
) -> HeartbeatReply:
    """Record that worker process `worker` is alive, its timings, and how much of it is in use.

    `running`: the seconds that each message has run, by id. `unrenewed`: ids of messages whose
    leases it could not renew; `ran` lists them, too, with 0, so that nobody takes them over.
    """
    cursor.execute(
        HEARTBEAT,
        {
            "worker": worker,
            "queues": json.dumps(list(queues)),
            "host": host,
            "pid": pid,
            "version": version,
            "wakeup": wakeup,
            "draining": draining,
            "quiet": quiet,
            "running": json.dumps(list(running)),
            "ran": json.dumps({**dict.fromkeys(unrenewed, 0), **running}),
            "timings": json.dumps(timings),
            **capacity._asdict(),
        },
    )
    since, now, commands, stored = cursor.fetchone()
    commands = json.loads(commands) if isinstance(commands, str) else commands
    return HeartbeatReply(since, now, [Command(*each) for each in commands or ()], stored)


REOPEN_COMMANDS = """
update django_mq_workercommand
   set taken_at = null
 where worker = %(worker)s and taken_at is not null and id <> all(%(received)s::bigint[])
"""


def reopen_commands(cursor: Cursor, *, worker: str, received: Sequence[int]) -> None:
    """Let the next heartbeat of `worker` take all commands again, except those it `received`."""
    cursor.execute(REOPEN_COMMANDS, {"worker": worker, "received": list(received)})


LEAVE = "delete from django_mq_workerheartbeat where id = %(worker)s"


def leave(cursor: Cursor, *, worker: str) -> None:
    """Delete the heartbeat of a worker process that ended."""
    cursor.execute(LEAVE, {"worker": worker})
