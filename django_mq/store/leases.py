"""Renew leases, and say which worker processes live."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django_mq.store import LOCKED, fence_columns, fenced

if TYPE_CHECKING:
    from django_mq.messages import Fence
    from django_mq.store import Cursor

# SKIP LOCKED: a row that its own slice has locked needs no lease while it is locked.
RENEW = f"""
update django_mq_queuedmessage
   set leased_until = greatest(
           leased_until, statement_timestamp() + make_interval(secs => %(lease)s))
 where id = any(array(
    select m.id
      from {fenced(last=LOCKED)}))
"""  # noqa: S608  (made of our own texts, as is the next)


def renew(cursor: Cursor, fences: Sequence[Fence], *, lease: float) -> None:
    """Move the leases of `fences` to `lease` seconds from now; never to an earlier time."""
    cursor.execute(RENEW, {**fence_columns(fences), "lease": lease})


# No SKIP LOCKED: these run outside transactions, so at most a renewal has them for a moment.
START = f"""
update django_mq_queuedmessage
   set leased_until = greatest(
           leased_until, statement_timestamp() + make_interval(secs => %(lease)s))
 where id = any(array(
    select m.id
      from {fenced(last="for no key update")}))
returning id, coalesce(expires_at <= statement_timestamp(), false)
"""  # noqa: S608


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
