"""The errors of a lost database, and those of a server that refuses a statement."""

from __future__ import annotations

import psycopg
from django.db.utils import InterfaceError, OperationalError

#: The errors of an unreachable or lost server, through Django and through the driver. A read-only
#: server is a standby after a failover.
LOST = (
    OperationalError,
    InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
)


def is_lost(error: BaseException) -> bool:
    """Return whether `error` is one of LOST, also where Django has given it a class of its own.

    Django knows no error of a read-only server: it raises InternalError because of the driver's.
    """
    return isinstance(error, LOST) or isinstance(error.__cause__, LOST)


#: SQLSTATEs of a reachable server that refuses a statement: it was cancelled, it is in conflict
#: with another transaction, or the disk is full.
_REFUSALS = frozenset({"57014", "40001", "40P01", "55P03", "53100"})


def was_refused(error: BaseException) -> bool:
    """Return whether a reachable server refused a statement, so that the database is not lost."""
    states = (getattr(each, "sqlstate", None) for each in (error, error.__cause__))
    return not _REFUSALS.isdisjoint(states)


def is_read_only(error: BaseException) -> bool:
    """Return whether the server is read only, as a standby is."""
    read_only = psycopg.errors.ReadOnlySqlTransaction
    return isinstance(error, read_only) or isinstance(error.__cause__, read_only)
