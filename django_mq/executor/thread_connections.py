"""Transactions that a call has left open on the connections of its thread.

Nobody would end them: what the next handlers of the thread write there would be lost with them.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

from django_mq.executor.connections import drop_connection


def open_aliases() -> set[str]:
    """Return the aliases on which this thread has a transaction open."""
    return {each.alias for each in connections.all(initialized_only=True) if is_open(each)}


def roll_back_open(*, excluding: Collection[str] = ()) -> list[str]:
    """Roll back the open transactions of this thread, and return the aliases that had one.

    Connections that only left autocommit off are closed. The aliases `excluding` stay as they are.
    """
    left = []
    for alias in sorted(open_aliases().difference(excluding)):
        if not _is_idle(connections[alias]):
            left.append(alias)
        drop_connection(connections[alias])
    return left


def is_open(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open, by Django or by a raw statement, or would be.

    With autocommit off the next statement would begin one.
    """
    if wrapper.connection is None or not wrapper.settings_dict["AUTOCOMMIT"]:
        return wrapper.in_atomic_block
    return not (wrapper.autocommit and _is_idle(wrapper))


def _is_idle(wrapper: BaseDatabaseWrapper) -> bool:
    if wrapper.in_atomic_block:
        return False
    driver = wrapper.connection
    if wrapper.vendor != "postgresql" or driver is None or driver.closed:
        return wrapper.autocommit
    return bool(driver.info.transaction_status == TransactionStatus.IDLE)
