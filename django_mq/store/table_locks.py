"""Which sessions lock whole tables, or wait to do so."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor

# The modes that conflict with a claim or a broadcast; only the last conflicts with reading, too. A
# lock that is not granted yet already makes later statements wait. A session's statement is not
# returned, since it may contain data. A login without pg_read_all_stats cannot see when other
# logins' sessions began.
LOCKS = """
select a.pid, array_agg(c.relname::text order by c.relname), bool_and(l.granted),
       coalesce(a.usename, ''), coalesce(a.application_name, ''), coalesce(a.state, ''),
       a.xact_start, pg_blocking_pids(a.pid)
  from pg_locks l
  join pg_class c on c.oid = l.relation
  join pg_stat_activity a on a.pid = l.pid
 where l.database = (select d.oid from pg_database d where d.datname = current_database())
   and c.relname = any(%(tables)s::text[])
   and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   and a.pid <> pg_backend_pid()
   and (a.xact_start is null
        or a.xact_start <= clock_timestamp() - make_interval(secs => %(older_than)s))
 group by a.pid, a.usename, a.application_name, a.state, a.xact_start
 order by 3 desc, a.xact_start, a.pid
 limit %(limit)s
"""


class TableLock(NamedTuple):
    """A session that has `tables` locked, or (not `granted`) waits for the sessions in `behind`.

    `since` is the begin of its transaction, None where this login may not see it.
    """

    pid: int
    tables: list[str]
    granted: bool
    login: str
    application: str
    state: str
    since: datetime | None
    behind: list[int]


def table_locks(
    cursor: Cursor, *, tables: Sequence[str], older_than: float, limit: int
) -> list[TableLock]:
    """Return the sessions whose locks on `tables` keep workers or producers waiting.

    Their transactions are older than `older_than` seconds; those that have their locks come first.
    """
    cursor.execute(LOCKS, {"tables": list(tables), "older_than": older_than, "limit": limit})
    return [TableLock._make(row) for row in cursor.fetchall()]
