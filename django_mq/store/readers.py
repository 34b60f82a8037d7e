"""The settings with which a transaction that only reads begins."""

from __future__ import annotations

from django_mq.store import Cursor

# The estimated cost of a bounded statement is high, since every subquery might reach its limit: JIT
# would spend a second compiling a statement that runs for a hundredth of one.
NO_JIT = "select set_config('jit', 'off', true)"
# Rows that one statement has found may be gone before the next one reads them.
ONE_SNAPSHOT = "set transaction isolation level repeatable read"
# A queue of a million messages among a thousand short ones is estimated as a short one: the planner
# would read and sort all its rows where a statement asks for the first few in index order.
PREPARE_TO_READ = """
select set_config('jit', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_seqscan', 'off', true),
       current_setting('transaction_read_only') = 'off'
       and has_any_column_privilege('django_mq_queuedmessage', 'update')
"""


def prepare_to_read(cursor: Cursor) -> bool:
    """Make this transaction read in index order, without JIT; return whether it may lock messages.

    Locking needs the UPDATE privilege, and a server that is not a standby.
    """
    cursor.execute(PREPARE_TO_READ)
    return bool(cursor.fetchone()[3])
