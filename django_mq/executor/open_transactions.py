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
    """Roll back the open transactions of this thread, and return their aliases.

    Those of the aliases `excluding` stay as they are.
    """
    found = sorted(open_aliases().difference(excluding))
    for alias in found:
        drop_connection(connections[alias])
    return found


def is_open(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open, by Django or by a raw statement."""
    driver = wrapper.connection
    if wrapper.in_atomic_block or driver is None or not wrapper.settings_dict["AUTOCOMMIT"]:
        return wrapper.in_atomic_block
    if not wrapper.autocommit:
        return True
    if wrapper.vendor != "postgresql" or driver.closed:
        return False
    return bool(driver.info.transaction_status != TransactionStatus.IDLE)
