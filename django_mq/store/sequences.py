"""The sequences of ids, which neither logical replication nor a copy of rows moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django_mq.store import Cursor


class Behind(NamedTuple):
    """A table whose next id is not above the `highest` one that is in use."""

    table: str
    next: int
    highest: int


# The snapshot, and so max(), is older than the value of the sequence. NULL: not used since it was
# created. max() reads one entry of an index, in a partitioned table one for each partition.
STATE = """
select coalesce(pg_sequence_last_value(used.sequence) + 1, 1), greatest({highest})
  from (select pg_get_serial_sequence('{table}', 'id')::regclass) as used (sequence)
 where has_sequence_privilege(used.sequence, 'usage')
"""


def behind(cursor: Cursor, ids: Mapping[str, Sequence[tuple[str, str]]]) -> list[Behind]:
    """Return the tables in `ids` whose sequence gives an id that is in use.

    Each table comes with the tables and columns, of which an index begins with each, that contain
    its ids. Leaves out sequences that this login may not use.
    """
    found = []
    for table, columns in ids.items():
        highest = ", ".join(f"(select max({column}) from {name})" for name, column in columns)
        cursor.execute(STATE.format(table=table, highest=highest))
        for next, largest in cursor.fetchall():
            if largest is not None and next <= largest:
                found.append(Behind(table, next, largest))
    return found
