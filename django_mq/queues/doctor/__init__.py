"""Find out what is wrong with an installation: `mq_doctor` is the face of `examine()`.

Each finding has an id, which docs/operating.md lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections, transaction
from psycopg.errors import InsufficientPrivilege, UndefinedColumn, UndefinedTable

from django_mq.conf import alias_of
from django_mq.executor.connections import LOST
from django_mq.policy.error_text import one_line
from django_mq.queues.doctor import links, schedules, schema, subscriptions, upkeep
from django_mq.queues.doctor.findings import Finding

__all__ = ["Finding", "examine"]

#: In the order of the report.
EXAMINATIONS: tuple[Callable[[str], Iterator[Finding]], ...] = (
    schema.migrations,
    schema.indexes,
    schema.rights,
    upkeep.snapshots,
    upkeep.slots,
    upkeep.autovacuum,
    upkeep.vacuum_behind,
    links.listening,
    links.pooler,
    links.clock,
    subscriptions.workerless,
    subscriptions.unserved,
    subscriptions.unheard,
    schedules.late_schedules,
    schedules.failing_schedules,
    links.limits,
)
#: D002 or D004 explains why a statement raised these.
EXPLAINED_ERRORS = (InsufficientPrivilege, UndefinedColumn, UndefinedTable)


def examine(*, using: str | None = None) -> list[Finding]:
    """Return the findings, the most basic first; an empty list if nothing is wrong.

    It changes nothing, and most statements are limited to 5 s. Use the workers' login: rights and
    limits are per login. It also opens connections of its own, as workers do.
    """
    alias = alias_of(using)
    found: list[Finding] = []
    for examination in EXAMINATIONS:
        try:
            with transaction.atomic(using=alias):
                found.extend(examination(alias))
        except (DatabaseError, InterfaceError, ImproperlyConfigured, *LOST) as error:
            if isinstance(error.__cause__, EXPLAINED_ERRORS):
                continue
            found.append(_check_failed(examination.__name__, error))
            if not _answers(alias):
                break
    return found


def _check_failed(name: str, error: Exception) -> Finding:
    return Finding(
        id="D001",
        level="error",
        text=f"Could not look at {name.replace('_', ' ')}:"
        f" {one_line(str(error)) or type(error).__name__}.",
        hint="Check that the server runs and that HOST, PORT, USER and PASSWORD of the alias are"
        " right.",
    )


def _answers(alias: str) -> bool:
    connection = connections[alias]
    if not connection.in_atomic_block:
        connection.close_if_unusable_or_obsolete()
    return bool(connection.is_usable()) if connection.connection is not None else False
