"""Vacuum the short-lived tables, for which the server's autovacuum runs too rarely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from django_mq.store import Cursor

#: The tables with short-lived rows, and the statement that vacuums each. It skips a table locked by
#: another vacuum or a migration; one CPU is enough.
VACUUM = {
    table: f"vacuum (skip_locked, parallel 0) {table}"
    for table in ("django_mq_queuedmessage", "django_mq_uniquekey")
}

# Other logins would get a warning each time. The owners of the table and of the database may vacuum
# it; from PostgreSQL 17 on, so may a login with MAINTAIN, a privilege unknown to older servers.
VERSIONS = """
select c.relname, pg_stat_get_dead_tuples(c.oid), pg_stat_get_live_tuples(c.oid),
       extract(epoch from statement_timestamp() - greatest(
           pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid)))::float8,
       pg_has_role(c.relowner, 'usage') or pg_has_role(d.datdba, 'usage')
           or case when current_setting('server_version_num')::int >= 170000
                   then has_table_privilege(c.oid, 'MAINTAIN') else false end
  from unnest(%(tables)s::text[]) as asked (name)
  join pg_class c on c.oid = to_regclass(asked.name)
  join pg_database d on d.datname = current_database()
 order by 1
"""


class Versions(NamedTuple):
    """The dead and live row versions of a table, by the server's statistics.

    Changes of the last second may be missing. `since`: seconds since the last vacuum; None if there
    was none since the statistics began. `may_vacuum`: this login may vacuum the table.
    """

    dead: int
    live: int
    since: float | None = None
    may_vacuum: bool = True


def versions(cursor: Cursor) -> Mapping[str, Versions]:
    """Return the row versions of each short-lived table."""
    cursor.execute(VERSIONS, {"tables": list(VACUUM)})
    return {table: Versions(*found) for table, *found in cursor.fetchall()}


def vacuum(cursor: Cursor, table: str) -> None:
    """Make the space of dead row versions reusable; call it outside a transaction."""
    # Not through the cursor: behind a pooler, the cursor wraps each statement in a transaction.
    cursor.connection.execute(VACUUM[table])
