"""Facts of the server: encoding, read-only mode, tables, indexes, rights, sequences, vacuum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor

ENCODING = "select current_setting('server_encoding')"


def encoding(cursor: Cursor) -> str:
    """Return the encoding of the database, as in "UTF8"."""
    cursor.execute(ENCODING)
    (name,) = cursor.fetchone()
    return str(name)


READ_ONLY = "select pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool"


def read_only(cursor: Cursor) -> tuple[bool, bool]:
    """Return whether the server is a standby, and whether transactions begin read only."""
    cursor.execute(READ_ONLY)
    is_standby, by_default = cursor.fetchone()
    return is_standby, by_default


FORMATS = """
select current_setting('DateStyle'), current_setting('extra_float_digits')::int,
       current_setting('array_nulls')::bool
"""


class Formats(NamedTuple):
    """How a session reads and writes values, by its settings; `date_style` is as in "ISO, MDY"."""

    date_style: str
    float_digits: int
    array_nulls: bool


def formats(cursor: Cursor) -> Formats:
    """Return the formats of this session."""
    cursor.execute(FORMATS)
    return Formats._make(cursor.fetchone())


MISSING_TABLES = """
select asked.name
  from unnest(%(tables)s::text[]) as asked (name)
 where to_regclass(asked.name) is null
 order by 1
"""


def missing_tables(cursor: Cursor, *, tables: Sequence[str]) -> list[str]:
    """Return the `tables` that this session does not find on its search path."""
    cursor.execute(MISSING_TABLES, {"tables": list(tables)})
    return [name for (name,) in cursor.fetchall()]


INDEXES = """
select asked.name, c.relname, i.indisvalid and i.indisready
  from unnest(%(tables)s::text[]) as asked (name)
  join pg_index i on i.indrelid = to_regclass(asked.name)
  join pg_class c on c.oid = i.indexrelid
"""


def indexes(cursor: Cursor, *, tables: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return the indexes of the `tables` that exist, and whether each index is valid."""
    cursor.execute(INDEXES, {"tables": list(tables)})
    found: dict[str, dict[str, bool]] = {}
    for table, index, valid in cursor.fetchall():
        found.setdefault(table, {})[index] = valid
    return found


MISSING_RIGHTS = """
select asked.name, array_agg(asked.privilege order by asked.privilege)
  from unnest(%(tables)s::text[], %(privileges)s::text[]) as asked (name, privilege)
 where to_regclass(asked.name) is not null
   and not has_table_privilege(to_regclass(asked.name), asked.privilege)
 group by asked.name
 union all
select c.relname, array['usage']
  from unnest(%(sequences_of)s::text[]) as asked (name)
  join pg_depend d on d.refobjid = to_regclass(asked.name) and d.deptype in ('a', 'i')
  join pg_class c on c.oid = d.objid
 where case when c.relkind = 'S' then not has_sequence_privilege(c.oid, 'usage') end
 order by 1
"""


def missing_rights(
    cursor: Cursor, needed: Mapping[str, Sequence[str]], *, sequences_of: Sequence[str]
) -> dict[str, list[str]]:
    """Return which of the privileges `needed`, by table, this login lacks.

    It also needs USAGE on the sequences that belong to the tables `sequences_of`.
    """
    pairs = [(table, right) for table, rights in needed.items() for right in rights]
    cursor.execute(
        MISSING_RIGHTS,
        {
            "tables": [table for table, _ in pairs],
            "privileges": [right for _, right in pairs],
            "sequences_of": list(sequences_of),
        },
    )
    return dict(cursor.fetchall())


# The snapshot, and so max(), is older than the value of the sequence. max() reads one entry of an
# index, in a partitioned table one for each partition.
SEQUENCE_STATE = """
select used.sequence, pg_sequence_last_value(used.sequence::regclass) + 1,
       has_sequence_privilege(used.sequence, 'select'), greatest({highest})
  from (select pg_get_serial_sequence('{table}', 'id')) as used (sequence)
 where has_sequence_privilege(used.sequence, 'usage')
"""

# Of a sequence that has given no id since it was created or moved (RESTART WITH).
FIRST_ID = "select last_value from {sequence}"


class Behind(NamedTuple):
    """A table whose next id is not above the `highest` one that is in use.

    Neither logical replication nor a copy of rows moves a sequence.
    """

    table: str
    next: int
    highest: int


def sequences_behind(cursor: Cursor, ids: Mapping[str, Sequence[tuple[str, str]]]) -> list[Behind]:
    """Return the tables in `ids` whose sequence gives an id that is in use.

    Each table comes with the tables and columns, of which an index begins with each, that contain
    its ids. Leaves out sequences that this login may not use, and takes a sequence that it may not
    read, and that has given no id, for a new one.
    """
    found = []
    for table, columns in ids.items():
        highest = ", ".join(f"(select max({column}) from {name})" for name, column in columns)
        cursor.execute(SEQUENCE_STATE.format(table=table, highest=highest))
        for sequence, next, may_read, largest in cursor.fetchall():
            if next is None and may_read:
                cursor.execute(FIRST_ID.format(sequence=sequence))
                [next] = cursor.fetchone()
            if largest is not None and (next := next or 1) <= largest:
                found.append(Behind(table, next, largest))
    return found


SECURED = """
select asked.name
  from unnest(%(tables)s::text[]) as asked (name)
 where row_security_active(to_regclass(asked.name))
 order by 1
"""


def secured_tables(cursor: Cursor, *, tables: Sequence[str]) -> list[str]:
    """Return the `tables` on which row-level security applies to this login."""
    cursor.execute(SECURED, {"tables": list(tables)})
    return [name for (name,) in cursor.fetchall()]


AUTOVACUUM = """
select current_setting('autovacuum')::bool and current_setting('track_counts')::bool,
       array(select c.relname::text
               from unnest(%(tables)s::text[]) as asked (name)
               join pg_class c on c.oid = to_regclass(asked.name)
              cross join unnest(c.reloptions) as option
              where option in ('autovacuum_enabled=false', 'autovacuum_enabled=off',
                               'autovacuum_enabled=0', 'autovacuum_enabled=no')
              order by 1)
"""


def autovacuum(cursor: Cursor, *, tables: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether autovacuum is on, and the `tables` for which it is off."""
    cursor.execute(AUTOVACUUM, {"tables": list(tables)})
    on, off = cursor.fetchone()
    return on, off


# A login without pg_read_all_stats sees what its own sessions wait for.
WAITING_COMMITS = """
select count(*), min(a.query_start)
  from pg_stat_activity a
 where a.wait_event = 'SyncRep'
   and a.query_start <= clock_timestamp() - make_interval(secs => %(older_than)s)
"""


def waiting_commits(cursor: Cursor, *, older_than: float) -> tuple[int, datetime | None]:
    """Return how many sessions have waited for a synchronous standby, and since when the first.

    Only those that have waited for `older_than` seconds count.
    """
    cursor.execute(WAITING_COMMITS, {"older_than": older_than})
    count, since = cursor.fetchone()
    return count, since


# A standby does not know how much WAL its upstream keeps. For a lost slot none is kept.
IDLE_SLOTS = """
select s.slot_name, pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint
  from pg_replication_slots s
 where not s.active and s.restart_lsn is not null and s.wal_status is distinct from 'lost'
   and not pg_is_in_recovery()
   and pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn) >= %(kept)s
 order by 2 desc
 limit %(limit)s
"""


def idle_slots(cursor: Cursor, *, kept: int, limit: int) -> list[tuple[str, int]]:
    """Return the inactive replication slots that keep at least `kept` bytes of WAL.

    Each comes with the bytes that it keeps; the largest come first.
    """
    cursor.execute(IDLE_SLOTS, {"kept": kept, "limit": limit})
    return [(name, size) for name, size in cursor.fetchall()]
