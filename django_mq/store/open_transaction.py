"""The open transaction: its constraints, its id, and its outcome."""

from __future__ import annotations

import psycopg

from django_mq.store import Cursor
from django_mq.store.limits import STATEMENT_SECONDS
from django_mq.store.row_locks import LOCK_WAIT_SECONDS

BEGIN_WITH_LOCK_WAIT = f"""
select set_config('statement_timeout', '{STATEMENT_SECONDS}s', true),
       set_config('lock_timeout', '{LOCK_WAIT_SECONDS}s', true), pg_current_xact_id()::text
"""


def begin_with_lock_wait(cursor: Cursor) -> str:
    """Limit the statements of the open transaction, and return its id.

    Each waits up to `LOCK_WAIT_SECONDS` for a lock.
    """
    cursor.execute(BEGIN_WITH_LOCK_WAIT)
    xid: str = cursor.fetchone()[2]
    return xid


# Only constraints that this login can name: temporary tables of other sessions have some, too.
INITIALLY_IMMEDIATE = """
select n.nspname, c.conname
  from pg_constraint c
  join pg_namespace n on n.oid = c.connamespace
 where c.condeferrable and not c.condeferred
   and not pg_is_other_temp_schema(n.oid) and has_schema_privilege(n.oid, 'usage')
"""


def initially_immediate(cursor: Cursor) -> list[tuple[str, str]]:
    """Return the schemas and names of deferrable constraints that are checked at once by default.

    SET CONSTRAINTS ALL DEFERRED defers these too; they must be named to undo that.
    """
    cursor.execute(INITIALLY_IMMEDIATE)
    found: list[tuple[str, str]] = cursor.fetchall()
    return found


CURRENT = "select pg_current_xact_id()::text"


def current_transaction(cursor: Cursor) -> str:
    """Return the id of the open transaction; if it changes, another transaction has begun."""
    cursor.execute(CURRENT)
    xid: str = cursor.fetchone()[0]
    return xid


STATUS = "select pg_xact_status(%(xid)s::xid8)"


def transaction_status(cursor: Cursor, xid: str) -> str | None:
    """Return committed, aborted or in progress; None if the server does not know.

    The server does not know a transaction that is too old, or one whose id it lost in a crash and
    has not assigned again.
    """
    try:
        cursor.execute(STATUS, {"xid": xid})
    except psycopg.errors.InvalidParameterValue:  # "transaction ID ... is in the future"
        return None
    status: str | None = cursor.fetchone()[0]
    return status
