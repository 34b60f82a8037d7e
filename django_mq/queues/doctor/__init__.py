"""Find out what is wrong with an installation; `mq_doctor` is the command for `examine()`.

Each finding has an id, which docs/operating.md lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections
from psycopg.errors import (
    InsufficientPrivilege,
    LockNotAvailable,
    QueryCanceled,
    SerializationFailure,
    UndefinedColumn,
    UndefinedTable,
)

from django_mq.conf import alias_of
from django_mq.executor.connections import WHICH_SERVICE, BackendFailed
from django_mq.executor.outage import MORE_CONNECTIONS, has_too_many_connections
from django_mq.policy.plain_text import one_line
from django_mq.queues.doctor import (
    capacity,
    links,
    locks,
    outages,
    schedules,
    schema,
    subscriptions,
    upkeep,
)
from django_mq.queues.doctor.findings import Finding, short_cursor
from django_mq.store.server_errors import LOST, was_refused

__all__ = ["Finding", "examine"]

#: The examinations, in the order of the report, each with a subject that names it if it fails. The
#: formats come first: with some, the driver reads no times, and most of the others fail.
EXAMINATIONS: tuple[tuple[str, Callable[[str], Iterator[Finding]]], ...] = (
    ("the formats", schema.formats),
    ("locks on tables", locks.locks),
    ("synchronous standbys", locks.waiting_commits),
    ("migrations", schema.migrations),
    ("indexes", schema.indexes),
    ("rights", schema.rights),
    ("row-level security", schema.row_security),
    ("sequences", schema.sequences),
    ("the encoding", schema.encoding),
    ("read-only sessions", schema.read_only),
    ("open snapshots", upkeep.snapshots),
    ("replication slots", upkeep.slots),
    ("autovacuum", upkeep.autovacuum),
    ("dead row versions", upkeep.vacuum_behind),
    ("notifications", links.listening),
    ("the pooler", links.pooler),
    ("the clocks", links.clock),
    ("live workers", subscriptions.workerless),
    ("queues without a worker", subscriptions.unserved),
    ("held messages", subscriptions.unheard),
    ("messages without a handler", subscriptions.unhandled),
    ("stalled lines", subscriptions.stalled),
    ("busy workers", capacity.saturated),
    ("workers that claim nothing", capacity.unclaimed),
    ("messages of workers that are gone", capacity.held_by_lost),
    ("paused queues", outages.paused),
    ("queues that back off", outages.backing_off),
    ("the figures of handlers", outages.unsuccessful),
    ("overdue schedules", schedules.late_schedules),
    ("failed schedules", schedules.failing_schedules),
    ("limits of the login", links.limits),
)
#: The findings that explain an error of a statement, if there are any.
EXPLAINED_ERRORS: dict[type[BaseException], tuple[str, ...]] = {
    InsufficientPrivilege: ("D002", "D004"),
    UndefinedColumn: ("D002", "D004"),
    UndefinedTable: ("D002", "D004"),
    LockNotAvailable: ("D031",),
}
#: Added to D001 if the database does not answer.
STOPPED = "The remaining checks did not run."
#: Errors of the database. The driver raises NotImplementedError for a time that it cannot read.
UNUSABLE = (DatabaseError, InterfaceError, ImproperlyConfigured, NotImplementedError, *LOST)


def examine(*, using: str | None = None) -> list[Finding]:
    """Return the findings, the most basic first; an empty list if nothing is wrong.

    It changes nothing. Most statements take at most 5 s, and wait at most 1 s for a lock. Use the
    workers' login: rights and limits are per login. It also opens connections of its own, as
    workers do.
    """
    alias = alias_of(using)
    found: list[Finding] = []
    explained: list[tuple[Finding, Sequence[str]]] = []
    for number, (subject, examination) in enumerate(EXAMINATIONS, 1):
        failure = f"Database {alias!r} cannot be reached"
        try:
            with short_cursor(alias):
                failure = f"Could not look at {subject}"
                found.extend(examination(alias))
        except UNUSABLE as error:
            failed = _check_failed(failure, error)
            found.append(failed)
            if explanations := EXPLAINED_ERRORS.get(type(error.__cause__ or error)):
                explained.append((failed, explanations))
            elif not _answers(alias):
                if number < len(EXAMINATIONS):
                    found[-1] = replace(failed, text=f"{failed.text} {STOPPED}")
                break
    # The explanation may be found after the error: rights are examined after migrations.
    ids = {each.id for each in found}
    needless = [failed for failed, explanations in explained if not ids.isdisjoint(explanations)]
    return [each for each in found if each not in needless]


def _check_failed(failure: str, error: Exception) -> Finding:
    said = one_line(str(error)) or type(error).__name__
    return Finding(
        id="D001",
        level="error",
        text=f"{failure}: {said if said.endswith('?') else said.rstrip('.') + '.'}",
        hint=_hint_of(error),
    )


def _hint_of(error: Exception) -> str:
    cause = error.__cause__ or error  # Django's errors have the driver's as their cause
    if isinstance(cause, LockNotAvailable):
        return (
            "Another session holds a lock, such as that of a migration or of VACUUM FULL: run"
            " mq_doctor again when it has ended."
        )
    if isinstance(cause, QueryCanceled):
        return "The server is busy, or the statement reads too much: run mq_doctor again later."
    if isinstance(cause, SerializationFailure):
        return (
            "Run mq_doctor again. A standby cancels queries to replay changes: prefer the primary."
        )
    if has_too_many_connections(str(error)):
        return f"All connections are taken: {MORE_CONNECTIONS}."
    if isinstance(cause, BackendFailed):
        return WHICH_SERVICE
    if isinstance(error, LOST) and not was_refused(error):
        return (
            "Check that the server runs and that HOST, PORT, NAME, USER and PASSWORD of the alias"
            " are right."
        )
    return "Correct what the text names, and run mq_doctor again."


def _answers(alias: str) -> bool:
    """Return whether the connection of the failed check works.

    If it broke, atomic() has tried to connect again; one more attempt could take minutes.
    """
    connection = connections[alias]
    return connection.connection is not None and bool(connection.is_usable())
