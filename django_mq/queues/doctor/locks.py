"""Waits of the whole fleet: for a session that locks a table, or for a synchronous standby."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import DatabaseError, transaction

from django_mq.conf.local_time import local_text
from django_mq.queues.doctor.findings import Finding, own_tables, short_cursor
from django_mq.store import server_facts
from django_mq.store.table_locks import TableLock, table_locks

#: Seconds after which a lock is reported: shorter ones are part of a migration.
LOCKED_SECONDS = 10.0
#: Seconds after which a COMMIT that waits for a standby is reported: shorter waits are a slow link.
COMMIT_SECONDS = 10.0
#: The maximum number of sessions that are reported, and of tables and sessions that one names.
MAX_SESSIONS, MAX_NAMED = 5, 3


def locks(alias: str) -> Iterator[Finding]:
    """D031: a session has a table locked, or waits to lock it."""
    yield from _locks(alias, LOCKED_SECONDS)


def waiting_commits(alias: str) -> Iterator[Finding]:
    """D033: COMMITs wait for a synchronous standby."""
    with short_cursor(alias) as cursor:
        count, since = server_facts.waiting_commits(cursor, older_than=COMMIT_SECONDS)
    if since is None:
        return
    yield Finding(
        id="D033",
        level="error",
        text=f"{'1 session waits' if count == 1 else f'{count:,} sessions wait'} in COMMIT for a"
        f" synchronous standby, the first since {local_text(since)}: producers hang, and workers"
        " claim nothing and store no heartbeats, so that they seem to be gone.",
        hint="Bring the standby back, or let the primary do without it: change"
        " synchronous_standby_names, and select pg_reload_conf().",
    )


def explained(alias: str) -> str:
    """Name the first session that locks a table now, and what to do about it; empty if none does.

    Also empty if the database does not say.
    """
    try:
        with transaction.atomic(using=alias):
            first = next(_locks(alias, 0.0), None)
    except DatabaseError:
        return ""
    return f"{first.text} {first.hint}" if first else ""


def _locks(alias: str, older_than: float) -> Iterator[Finding]:
    with short_cursor(alias) as cursor:
        found = table_locks(cursor, tables=own_tables(), older_than=older_than, limit=MAX_SESSIONS)
    for each in found:
        yield Finding(id="D031", level="error", text=_locked_by(each), hint=_remedy(each))


def _locked_by(lock: TableLock) -> str:
    known = ", ".join(filter(None, (lock.login, lock.application, lock.state)))
    lasts = f"has been open since {local_text(lock.since)}" if lock.since else "is open"
    names = lock.tables[:MAX_NAMED] + ["others"] * (len(lock.tables) > MAX_NAMED)
    tables = f"the table{'' if len(names) == 1 else 's'} {', '.join(names)}"
    session = f"Session {lock.pid} of the server{f' ({known})' if known else ''}"
    if lock.granted:
        return (
            f"{session} has locked {tables} in a transaction that {lasts}: workers and producers"
            " wait."
        )
    return (
        f"{session} waits to lock {tables}, in a transaction that {lasts}: workers and producers"
        " wait behind it."
    )


def _remedy(lock: TableLock) -> str:
    if lock.granted and not lock.behind:
        return (
            "If it is a migration that works, let it finish; else end it: select"
            f" pg_terminate_backend({lock.pid})."
        )
    behind = [
        f"session {pid}" if pid else "a prepared transaction (pg_prepared_xacts)"
        for pid in lock.behind[:MAX_NAMED]
    ]
    waits = f"It waits for {', '.join(behind)}: end" if behind else "End"
    return (
        f"{waits} what it waits for, or stop it: select pg_terminate_backend({lock.pid}). Let"
        " migrations set a lock_timeout."
    )
