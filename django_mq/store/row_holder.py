"""Which session has the row of a message locked."""

from __future__ import annotations

from typing import NamedTuple

from django_mq.store import Cursor

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
