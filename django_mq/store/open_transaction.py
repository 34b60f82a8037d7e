"""The open transaction: its settings, its id, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from django_mq.store import Cursor
from django_mq.store.limits import STATEMENT_SECONDS
from django_mq.store.row_locks import PATIENCE


def set_local(settings: Mapping[str, str]) -> str:
    """Return the statements that set integer settings until the end of the transaction.

    >>> set_local({"lock_timeout": "50", "client_connection_check_interval": "500"})
    'set local lock_timeout = 50; set local client_connection_check_interval = 500; '
    """
    return "".join([f"set local {name} = {int(value)}; " for name, value in settings.items()])


PATIENTLY = f"""
select set_config('statement_timeout', '{STATEMENT_SECONDS}s', true),
       set_config('lock_timeout', '{PATIENCE}s', true), pg_current_xact_id()::text
"""


def begin_patiently(cursor: Cursor) -> str:
    """Limit the statements of the open transaction, and return its id.

    Each waits up to `PATIENCE` seconds for a lock.
    """
    cursor.execute(PATIENTLY)
    xid: str = cursor.fetchone()[2]
    return xid


CURRENT = "select pg_current_xact_id()::text"


def current_transaction(cursor: Cursor) -> str:
    """Return the id of the open transaction; if it changes, another transaction has begun."""
    cursor.execute(CURRENT)
    xid: str = cursor.fetchone()[0]
    return xid


STATUS = "select pg_xact_status(%(xid)s::xid8)"


def transaction_status(cursor: Cursor, xid: str) -> str | None:
    """Return committed, aborted or in progress; None if the server does not know.

    It does not know a transaction that is too old, or one whose id it lost in a crash and has not
    assigned again.
    """
    try:
        cursor.execute(STATUS, {"xid": xid})
    except psycopg.errors.InvalidParameterValue:  # "transaction ID ... is in the future"
        return None
    status: str | None = cursor.fetchone()[0]
    return status
