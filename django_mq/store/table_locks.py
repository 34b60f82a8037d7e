"""Which sessions lock whole tables, or wait to do so."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor

# The modes that conflict with a claim or a broadcast; only the last conflicts with reading, too. A
# lock that is not granted yet already makes later statements wait. A session's statement is not
# returned, since it may contain data. A login without pg_read_all_stats cannot see when other
# logins' transactions began, but how long their locks have kept somebody waiting.
LOCKS = """
select a.pid,
       coalesce(array_agg(c.relname::text order by c.relname) filter (where not l.granted),
                array_agg(c.relname::text order by c.relname)),
       bool_and(l.granted),
       coalesce(a.usename, ''), coalesce(a.application_name, ''), coalesce(a.state, ''),
       a.xact_start, pg_blocking_pids(a.pid)
  from pg_locks l
  join pg_class c on c.oid = l.relation
  join pg_stat_activity a on a.pid = l.pid
 where l.database = (select d.oid from pg_database d where d.datname = current_database())
   and l.relation = any(array(select to_regclass(name) from unnest(%(tables)s::text[]) as name))
   and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   and a.pid <> pg_backend_pid()
   and a.backend_type is distinct from 'autovacuum worker'
   and (%(older_than)s::float8 = 0
        or coalesce(a.xact_start,
                    (select min(w.waitstart) from pg_locks w
                      where w.database = l.database and w.relation = l.relation))
           <= clock_timestamp() - make_interval(secs => %(older_than)s))
 group by a.pid, a.usename, a.application_name, a.state, a.xact_start
 order by 3 desc, a.xact_start, a.pid
 limit %(limit)s
"""


class TableLock(NamedTuple):
    """A session that has `tables` locked, or (not `granted`) waits to lock them.

    It waits for the sessions in `behind`; 0 is a prepared transaction. `since` is the start of its
    own transaction, None where this login may not see it.
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

    Their transactions are at least `older_than` seconds old, or have kept another session waiting
    for as long if their age is hidden. Those that have their locks come first.
    """
    cursor.execute(LOCKS, {"tables": list(tables), "older_than": older_than, "limit": limit})
    return [TableLock._make(row) for row in cursor.fetchall()]
