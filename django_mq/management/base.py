"""The base of the operator commands: database choice, error texts and confirmation."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from psycopg.errors import UndefinedColumn, UndefinedTable

from django_mq.conf import alias_of
from django_mq.exceptions import MQError
from django_mq.management.output import as_json
from django_mq.policy.error_text import one_line
from django_mq.queues import Changed

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class OperatorCommand(BaseCommand):
    """A command that calls `django_mq.queues`; subclasses write `operate`.

    Bad input and database errors become a CommandError: exit code 1.
    """

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="database of the messages (default: the setting DATABASE, or the router's choice)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        alias = chosen_database(options.setdefault("database", None))
        try:
            self.operate(**options)
        except (MQError, ValueError, DatabaseError) as error:
            if isinstance(error.__cause__, UndefinedTable | UndefinedColumn):
                must_be_migrated(connections[alias])
            raise CommandError(one_line(str(error)) or type(error).__name__) from error

    def operate(self, *, database: str | None, **options: Any) -> None:
        """Run the command with its parsed options."""
        raise NotImplementedError

    def confirm(self, question: str, *, yes: bool, json: bool = False, **options: Any) -> bool:
        """Ask for confirmation of an action that cannot be undone.

        Without a terminal, or with JSON output, `--yes` is required.
        """
        if yes:
            return True
        if json or not sys.stdin.isatty():
            raise CommandError(f"{question} Pass --yes to confirm.")
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def agreed(self, question: str, *, yes: bool, as_json: bool) -> bool:
        """Ask for confirmation of an action that can be undone, at a terminal only."""
        if yes or as_json or not sys.stdin.isatty():
            return True
        return self.confirm(question, yes=False)

    def report(
        self, verb: str, changed: Changed, *, json: bool, dry_run: bool, **options: Any
    ) -> None:
        """Print how many messages were changed and skipped; in JSON, the ids as well."""
        if json:
            answer = {"ids": changed.ids, "skipped": changed.skipped, "dry_run": dry_run}
            self.stdout.write(as_json(answer))
            return
        skipped = f", skipped {changed.skipped:,} (in flight or changed)" if changed.skipped else ""
        self.stdout.write(f"{verb} {count(len(changed.ids))}{skipped}.")

    def nothing(self, text: str, found: Changed, *, json: bool, **options: Any) -> None:
        """Print that nothing was changed."""
        if json:
            self.report("", Changed((), found.skipped), json=True, **options)
        else:
            self.stdout.write(text)


def chosen_database(alias: str | None) -> str:
    """Return the alias of the messages' database; `alias` is the option, if it was given.

    Raises CommandError if the alias does not exist or is not PostgreSQL.
    """
    alias = alias_of(None) if alias is None else alias
    if alias not in connections:
        raise CommandError(
            f"DATABASES has no {one_line(alias)!r}; choose one of {', '.join(connections)}"
        )
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise CommandError(
            f"database {alias!r} is {connection.display_name}; django_mq needs PostgreSQL"
        )
    return alias


def must_be_migrated(connection: BaseDatabaseWrapper) -> None:
    """Raise CommandError if migrations of django_mq have not been applied."""
    executor = MigrationExecutor(connection)
    app = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "django_mq"]
    if executor.migration_plan(app):
        raise CommandError(
            f"the tables in database {connection.alias!r} are not up to date: run manage.py migrate"
        )


def count(n: int) -> str:
    """Return the number `n` with its noun.

    >>> count(1), count(1200)
    ('1 message', '1,200 messages')
    """
    return f"{n:,} message{'' if n == 1 else 's'}"


def add_queue_options(parser: CommandParser) -> None:
    """Add the options of a command that changes one queue."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and stop")
    parser.add_argument("--yes", action="store_true", help="skip the question at a terminal")
    parser.add_argument("--json", action="store_true", help="print JSON and ask nothing")


#: The options of `add_selection` that select messages by a shared property.
SELECTION = ("queue", "type", "handler", "key")


def add_selection(parser: CommandParser) -> None:
    """Add the options that select dead letters."""
    parser.add_argument(
        "--id",
        type=int,
        nargs="+",
        action="extend",
        dest="ids",
        metavar="ID",
        help="these messages",
    )
    parser.add_argument("--queue", metavar="NAME", help="messages of this queue")
    parser.add_argument("--type", metavar="TYPE", help="messages of exactly this type")
    parser.add_argument("--handler", metavar="NAME", help="messages of this handler")
    parser.add_argument("--key", metavar="KEY", help="messages with this order key")
    parser.add_argument("--all", action="store_true", help="messages of every queue and type")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N, longest dead first")
    parser.add_argument("--dry-run", action="store_true", help="print the number, change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print JSON, with the ids")


def check_selection(chosen: Iterable[object], everything: bool) -> None:
    """Raise CommandError unless the options select messages in exactly one way."""
    some = any(each is not None for each in chosen)
    if not some and not everything:
        raise CommandError("select messages: by --id, --queue, --type, --handler, --key, or --all")
    if some and everything:
        raise CommandError("--all cannot be combined with another selection")


def duration(text: str) -> float:
    """Read seconds, or a number with a unit, from the command line.

    >>> duration("90"), duration("1.5h"), duration("2d")
    (90.0, 5400.0, 172800.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{one_line(text)!r} is not a duration such as 90, 90s, 15m, 2h or 1d"
        )
    return float(found[1]) * _UNITS[found[2]]


def moment(text: str) -> datetime:
    """Read an ISO 8601 date and time, in the project's time zone if it has no offset."""
    try:
        found = parse_datetime(text.strip())
    except ValueError:
        found = None
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{one_line(text)!r} is not a date and time such as 2026-12-24T18:00+01:00"
        )
    return timezone.make_aware(found) if timezone.is_naive(found) else found
