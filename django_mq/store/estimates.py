"""How many messages a queue has, by the server's statistics, where counting would take too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.store import Cursor

# As the planner does it: rows per page when the table was last analyzed or vacuumed, times the
# pages that it has now, times the share of the queue. A rare queue is not among the statistics.
ESTIMATES = """
select common.queue, (common.share * c.reltuples / c.relpages
                      * (pg_relation_size(c.oid) / current_setting('block_size')::int))::bigint
  from pg_class c
  join pg_namespace n on n.oid = c.relnamespace
  join pg_stats s on s.schemaname = n.nspname and s.tablename = c.relname and s.attname = 'queue'
 cross join lateral unnest(s.most_common_vals::text::text[], s.most_common_freqs)
         as common (queue, share)
 where c.oid = 'django_mq_queuedmessage'::regclass
   and c.reltuples > 0 and c.relpages > 0
   and common.queue = any(%(queues)s)
"""


def estimates(cursor: Cursor, *, queues: Sequence[str]) -> dict[str, int]:
    """Return about how many messages, dead letters included, each of the large `queues` has."""
    cursor.execute(ESTIMATES, {"queues": list(queues)})
    return dict(cursor.fetchall())
