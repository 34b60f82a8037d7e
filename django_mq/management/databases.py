"""The database of the messages: which one a command uses, and whether it can be used."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.errors import InsufficientPrivilege, LockNotAvailable, UndefinedColumn, UndefinedTable

from django_mq.conf import alias_of
from django_mq.executor.connections import WHICH_SERVICE, BackendFailed
from django_mq.policy.plain_text import one_line
from django_mq.queues.doctor.locks import explained
from django_mq.queues.doctor.schema import (
    formats,
    migrate_command,
    read_only,
    unapplied_migrations,
)
from django_mq.queues.transactions import limited_throughout
from django_mq.store.server_errors import LOST, is_read_only, was_refused

#: Other errors of an unusable database. Django reads an alias when it first connects; the driver
#: raises NotImplementedError for times in a DateStyle other than ISO.
UNUSABLE = (InterfaceError, ImproperlyConfigured, NotImplementedError)

#: Seconds that an operator's command waits for a lock. Then it names the session that holds it,
#: which may be a migration that takes hours.
LOCK_SECONDS = 5.0


def chosen_database(alias: str | None) -> str:
    """Return the alias of the messages' database; `alias` is the option, if given.

    Raises CommandError if the alias does not exist, is not PostgreSQL, or has no autocommit: with
    exit code 2 if the option names it, with 1 if the configuration chose it.
    """
    code = 1 if alias is None else 2
    alias = alias_of(None) if alias is None else alias
    if alias not in connections:
        text = f"DATABASES has no {one_line(alias)!r}; choose one of {', '.join(connections)}"
        raise CommandError(text, returncode=code)
    connection = connections[alias]
    if connection.vendor != "postgresql":
        text = f"database {alias!r} is {connection.display_name}; django_mq needs PostgreSQL"
        raise CommandError(text, returncode=code)
    if not connection.settings_dict["AUTOCOMMIT"]:
        text = f"AUTOCOMMIT is off for database {alias!r}: nothing would be committed"
        raise CommandError(text, returncode=code)
    return alias


@contextmanager
def limited_waits(alias: str) -> Iterator[None]:
    """Let each statement of the block wait at most `LOCK_SECONDS` for a lock on a table or a row.

    A transaction of the caller keeps its own limit.
    """
    connection = connections[alias]
    if connection.in_atomic_block or (connection.connection and not connection.autocommit):
        yield
        return
    with limited_throughout(alias, f"set local lock_timeout = {round(LOCK_SECONDS * 1000)}"):
        yield


def missing_role(error: BaseException, role: str) -> str:
    """Return the sentence that names `role` if the login may not do what it tried; else ""."""
    if isinstance(error.__cause__, InsufficientPrivilege):
        return f". The login needs the role {role}: see 'Database roles' in the documentation"
    return ""


def which_service(error: BaseException) -> str:
    """Return advice, as a sentence to append, if the backend failed to connect; else ""."""
    return f". {WHICH_SERVICE}" if isinstance(error.__cause__, BackendFailed) else ""


def refusal(error: Exception, alias: str, role: str) -> CommandError:
    """Return the error of a command for an error of the library or the database."""
    text = one_line(str(error)) or type(error).__name__
    if isinstance(error, LOST) and not was_refused(error):
        text = f"database {alias!r} cannot be used: {text}{which_service(error)}"
    elif is_read_only(error):
        text = f"database {alias!r} is read-only: {text}"
    elif isinstance(error.__cause__, LockNotAvailable):
        # The server tells where it waited, unless that was for a table.
        table = "" if error.__cause__.diag.context else explained(alias)
        reason = table or "Another session holds a lock: try again in a moment."
        text = f"the command has waited too long for a lock. {reason}"
    if isinstance(error.__cause__, UndefinedTable | UndefinedColumn):
        text += missing_migrations(connections[alias])
    text += missing_role(error, role)
    return CommandError(text, returncode=2 if isinstance(error, ValueError) else 1)


def must_be_migrated(connection: BaseDatabaseWrapper) -> None:
    """Raise CommandError if migrations of django_mq have not been applied."""
    if unapplied_migrations(connection):
        raise CommandError(
            f"the tables in database {connection.alias!r} are not up to date:"
            f" run {migrate_command(connection.alias)}"
        )


def must_be_usable(alias: str) -> None:
    """Raise CommandError if a worker cannot work with the engine, the server or the login.

    If the server is read only, or a setting breaks values, a worker would run handlers, and record
    no failed attempt or a wrong time. A pool of the engine's own outlives `close()`: processes that
    are forked then share its connections.
    """
    connections[alias].ensure_connection()
    driver = connections[alias].connection
    if not isinstance(driver, psycopg.Connection):
        raise CommandError(
            f"database {alias!r} cannot be used: its ENGINE lends connections of type"
            f" {type(driver).__name__}, but workers need psycopg's. Use an ENGINE without a pool"
            " of its own; Django's own pool is OPTIONS = {'pool': True}."
        )
    for finding in (*formats(alias), *read_only(alias)):
        raise CommandError(f"database {alias!r} cannot be used: {finding.text} {finding.hint}")


def missing_migrations(connection: BaseDatabaseWrapper) -> str:
    """Raise CommandError if migrations have not been applied.

    Returns a hint at missing migrations if the login may not look, like most roles in
    docs/roles.md; else "".
    """
    try:
        must_be_migrated(connection)
    except DatabaseError:
        return f". Migrations may be missing: run {migrate_command(connection.alias)}"
    return ""


def add_database(parser: ArgumentParser) -> None:
    """Add the option that names the database of the messages."""
    parser.add_argument(
        "--database",
        metavar="ALIAS",
        help="database of the messages (default: the setting DATABASE, or the router's choice)",
    )
