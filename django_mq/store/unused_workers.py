"""Find worker processes that have threads to spare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mq.policy.line_shares import UnusedWorker

if TYPE_CHECKING:
    from django_mq.store import Cursor

# A heartbeat has the mean number of threads in use since the one before; the first has none.
UNUSED = """
select id, array(select jsonb_array_elements_text(queues)), round(threads - threads_used)::int,
       extract(epoch from last_seen)::float8
  from django_mq_workerheartbeat
 where last_seen > statement_timestamp() - make_interval(secs => %(silent)s)
   and threads - threads_used >= 0.5
   and not draining and not quiet and id <> %(worker)s
 order by id
"""


def find(cursor: Cursor, *, worker: str, silent: float) -> list[UnusedWorker]:
    """Return the other processes than `worker` with unused threads.

    Those that have been silent for `silent` seconds are left out.
    """
    cursor.execute(UNUSED, {"worker": worker, "silent": silent})
    return [
        UnusedWorker(id, tuple(patterns), unused, seen_at)
        for id, patterns, unused, seen_at in cursor.fetchall()
    ]
