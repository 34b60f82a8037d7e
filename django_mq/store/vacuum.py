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
select c.relname, pg_stat_get_dead_tuples(c.oid), pg_stat_get_live_tuples(c.oid)
  from unnest(%(tables)s::text[]) as asked (name)
  join pg_class c on c.oid = to_regclass(asked.name)
  join pg_database d on d.datname = current_database()
 where pg_has_role(c.relowner, 'usage')
    or pg_has_role(d.datdba, 'usage')
    or case when current_setting('server_version_num')::int >= 170000
            then has_table_privilege(c.oid, 'MAINTAIN') else false end
"""


class Versions(NamedTuple):
    """The dead and live row versions of a table, by the server's statistics.

    Changes of the last second may be missing.
    """

    dead: int
    live: int


def versions(cursor: Cursor) -> Mapping[str, Versions]:
    """Return the row versions of each short-lived table that this login may vacuum."""
    cursor.execute(VERSIONS, {"tables": list(VACUUM)})
    return {table: Versions(dead, live) for table, dead, live in cursor.fetchall()}


def vacuum(cursor: Cursor, table: str) -> None:
    """Make the space of dead row versions reusable; call it outside a transaction."""
    # Not through the cursor: behind a pooler, the cursor wraps each statement in a transaction.
    cursor.connection.execute(VACUUM[table])
