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


# The snapshot, and so max(), is older than the value of the sequence. max() reads one entry of an
# index, in a partitioned table one for each partition.
STATE = """
select used.sequence, pg_sequence_last_value(used.sequence::regclass) + 1,
       has_sequence_privilege(used.sequence, 'select'), greatest({highest})
  from (select pg_get_serial_sequence('{table}', 'id')) as used (sequence)
 where has_sequence_privilege(used.sequence, 'usage')
"""

# Of a sequence that has given no id since it was created or moved (RESTART WITH).
FIRST = "select last_value from {sequence}"


def behind(cursor: Cursor, ids: Mapping[str, Sequence[tuple[str, str]]]) -> list[Behind]:
    """Return the tables in `ids` whose sequence gives an id that is in use.

    Each table comes with the tables and columns, of which an index begins with each, that contain
    its ids. Leaves out sequences that this login may not use, and takes a sequence that it may not
    read, and that has given no id, for a new one.
    """
    found = []
    for table, columns in ids.items():
        highest = ", ".join(f"(select max({column}) from {name})" for name, column in columns)
        cursor.execute(STATE.format(table=table, highest=highest))
        for sequence, next, may_read, largest in cursor.fetchall():
            if next is None and may_read:
                cursor.execute(FIRST.format(sequence=sequence))
                [next] = cursor.fetchone()
            if largest is not None and (next := next or 1) <= largest:
                found.append(Behind(table, next, largest))
    return found
