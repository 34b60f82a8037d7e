"""Find the oldest snapshots and transactions, which keep vacuum from removing dead rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django_mq.store import Cursor

# While a snapshot is held, vacuum cannot remove the dead rows of a busy queue, and every claim
# scans past them. So it is for the id of a transaction that has written, which at READ COMMITTED
# has no snapshot between its statements. VACUUM ignores the snapshots of other VACUUMs, but not
# those of ANALYZE or of VACUUM FULL (ComputeXidHorizons() of the server's procarray.c).
# The xmin of a standby with hot_standby_feedback has no beginning, so such a standby is not found.
# The server disregards the xmin of a lost slot, but still shows it.
# A session's statement is not returned, since it may contain data. A login without
# pg_read_all_stats cannot see when other logins' sessions began, so those are missing.
HORIZON = """
select held.kind, held.name, held.login, held.application, held.state, held.since
  from (
    select 'session' as kind, a.pid::text as name, coalesce(a.usename, '') as login,
           coalesce(a.application_name, '') as application, coalesce(a.state, '') as state,
           a.xact_start as since, greatest(age(a.backend_xmin), age(a.backend_xid)) as age
      from pg_stat_activity a
     where (a.backend_xmin is not null or a.backend_xid is not null)
       and a.pid <> pg_backend_pid()
       and (a.datname = current_database() or a.datname is null)
       and not exists (select 1 from pg_stat_progress_vacuum v where v.pid in (a.pid, a.leader_pid))
    union all
    select 'prepared transaction', p.gid, p.owner, '', '', p.prepared, age(p.transaction)
      from pg_prepared_xacts p
     where p.database = current_database()
    union all
    select 'replication slot', s.slot_name, '', coalesce(s.plugin, ''), 'inactive', null,
           age(s.xmin)
      from pg_replication_slots s
     where s.xmin is not null and not s.active and s.wal_status is distinct from 'lost'
  ) held
 where held.since <= clock_timestamp() - make_interval(secs => %(older_than)s)
    or held.kind = 'replication slot'
 order by held.age desc, held.since
 limit %(limit)s
"""


@dataclass(frozen=True, slots=True)
class HorizonHolder:
    """A snapshot, or a transaction that has written, that keeps vacuum from removing dead rows.

    The `name` of a session is its process id. `since` is None (unknown) for a replication slot.
    """

    kind: str
    name: str
    login: str
    application: str
    state: str
    since: datetime | None


def horizon(cursor: Cursor, *, older_than: float, limit: int) -> list[HorizonHolder]:
    """Return the holders that have kept vacuum back for `older_than` seconds, the oldest first.

    Slots are returned whatever their age.
    """
    cursor.execute(HORIZON, {"older_than": older_than, "limit": limit})
    return [HorizonHolder(*row) for row in cursor.fetchall()]
