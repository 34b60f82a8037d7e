"""The obstacles of a due message: the messages claimed before it, or a session that locks it."""

from __future__ import annotations

from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.queue_names import LANES
from django_mq.store.readers import prepare_to_read

# Walks lane by lane over the first due messages: a plain count could scan a million delayed
# messages of a higher priority, or a million of the same priority that are due at the same moment.
AHEAD = f"""
with recursive message as materialized (
    select m.id, m.priority, m.processable_after
      from django_mq_queuedmessage m
     where m.id = %(id)s
), {LANES}
select count(*)
  from (
    select
      from message
      join lane on lane.priority >= message.priority
     cross join lateral (
        select m.processable_after, m.id
          from django_mq_queuedmessage m
         where m.queue = lane.queue and m.priority = lane.priority
           and {WAITS}
           and m.processable_after <= statement_timestamp()
         order by m.processable_after, m.id
         limit %(maximum)s
     ) first
     where lane.priority > message.priority
        or lane.priority = message.priority
           and (first.processable_after, first.id) < (message.processable_after, message.id)
     limit %(maximum)s
  ) ahead
"""


def ahead(cursor: Cursor, *, id: int, queue: str, maximum: int) -> int:
    """Return how many due messages of `queue` are claimed before message `id`, which waits in it.

    The count stops at `maximum`.
    """
    prepare_to_read(cursor)
    cursor.execute(AHEAD, {"id": id, "queues": [queue], "maximum": maximum})
    return int(cursor.fetchone()[0])


# xmax is the transaction that locked the row last. If several sessions share the lock, it is the
# id of their group instead, which belongs to no transaction, except by chance: this is only shown.
HOLDER = """
select a.pid, a.application_name
  from django_mq_queuedmessage m
  join pg_locks held
    on held.locktype = 'transactionid' and held.transactionid = m.xmax and held.granted
  join pg_stat_activity a on a.pid = held.pid and a.datname = current_database()
 where m.id = %(id)s and a.pid <> pg_backend_pid()
"""


class RowHolder(NamedTuple):
    """A session by its process id on the server.

    `application` is empty if it has none, None where this login may not see it.
    """

    pid: int
    application: str | None


def holder(cursor: Cursor, id: int) -> RowHolder | None:
    """Return the session that has message `id` locked; None if none has."""
    cursor.execute(HOLDER, {"id": id})
    row = cursor.fetchone()
    return None if row is None else RowHolder._make(row)
