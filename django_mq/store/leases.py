"""Renew leases, and say which worker processes live."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django_mq.store import fence_columns

if TYPE_CHECKING:
    from django_mq.messages import Fence
    from django_mq.store import Cursor

# SKIP LOCKED: a row that its own slice has locked needs no lease while it is locked.
RENEW = """
update django_mq_queuedmessage m
   set leased_until = greatest(
           m.leased_until, statement_timestamp() + make_interval(secs => %(lease)s))
  from (
    select m.id
      from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[])
           as fence (id, attempt, claimer)
      join django_mq_queuedmessage m
        on m.id = fence.id and m.attempts = fence.attempt and m.claimed_by = fence.claimer
       for no key update of m skip locked
  ) ours
 where m.id = ours.id
"""


def renew(cursor: Cursor, fences: Sequence[Fence], *, lease: float) -> None:
    """Move the leases of `fences` to `lease` seconds from now; never to an earlier time."""
    cursor.execute(RENEW, {**fence_columns(fences), "lease": lease})


# No SKIP LOCKED: these run outside transactions, so at most a renewal has them for a moment.
START = """
update django_mq_queuedmessage m
   set leased_until = greatest(
           m.leased_until, statement_timestamp() + make_interval(secs => %(lease)s))
  from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[])
       as fence (id, attempt, claimer)
 where m.id = fence.id and m.attempts = fence.attempt and m.claimed_by = fence.claimer
returning m.id, coalesce(m.expires_at <= statement_timestamp(), false)
"""


def start(cursor: Cursor, fences: Sequence[Fence], *, lease: float) -> dict[int, bool]:
    """Give messages a whole lease before their handlers run outside a transaction.

    Returns for each id that is still ours whether it expired.
    """
    cursor.execute(START, {**fence_columns(fences), "lease": lease})
    return dict(cursor.fetchall())


BEAT = """
insert into django_mq_workerheartbeat
       (id, queues, host, pid, version, wakeup, draining, running, timings)
values (%(worker)s, %(queues)s::jsonb, %(host)s, %(pid)s, %(version)s, %(wakeup)s,
        %(draining)s, %(running)s::jsonb, %(timings)s::jsonb)
    on conflict (id) do update
   set last_seen = statement_timestamp(), wakeup = excluded.wakeup,
       draining = excluded.draining, running = excluded.running, timings = excluded.timings
"""


def beat(
    cursor: Cursor,
    *,
    worker: str,
    queues: Sequence[str],
    host: str,
    pid: int,
    version: str,
    wakeup: str,
    draining: bool,
    running: Sequence[int],
    timings: Mapping[str, Any],
) -> None:
    """Say that worker process `worker` lives, which message ids it runs, and what it did."""
    cursor.execute(
        BEAT,
        {
            "worker": worker,
            "queues": json.dumps(list(queues)),
            "host": host,
            "pid": pid,
            "version": version,
            "wakeup": wakeup,
            "draining": draining,
            "running": json.dumps(list(running)),
            "timings": json.dumps(timings),
        },
    )


LEAVE = "delete from django_mq_workerheartbeat where id = %(worker)s"


def leave(cursor: Cursor, *, worker: str) -> None:
    """Strike a worker process that ended from the list."""
    cursor.execute(LEAVE, {"worker": worker})
