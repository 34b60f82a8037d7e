"""Vacuum of the short-lived tables, where the server's own comes too rarely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: The tables whose rows live for moments, and what vacuums each. A table that another vacuum, or
#: a migration, has is left to it; one CPU is enough.
VACUUM = {
    table: f"vacuum (skip_locked, parallel 0) {table}"
    for table in ("django_mq_queuedmessage", "django_mq_uniquekey")
}

# Who does not own a table may not vacuum it, and would be told so each time.
VERSIONS = """
select c.relname, pg_stat_get_dead_tuples(c.oid), pg_stat_get_live_tuples(c.oid)
  from unnest(%(tables)s::text[]) as asked (name)
  join pg_class c on c.oid = to_regclass(asked.name)
 where pg_has_role(c.relowner, 'usage')
"""


class Versions(NamedTuple):
    """How many row versions of a table are dead, and how many are not, as the server counts.

    What others did within the last second may be missing.
    """

    dead: int
    live: int


def versions(cursor: Cursor) -> Mapping[str, Versions]:
    """Return the versions of each short-lived table that this login may vacuum."""
    cursor.execute(VERSIONS, {"tables": list(VACUUM)})
    return {table: Versions(dead, live) for table, dead, live in cursor.fetchall()}


def vacuum(cursor: Cursor, table: str) -> None:
    """Make the room of dead row versions free again; not within a transaction."""
    cursor.execute(VACUUM[table])
