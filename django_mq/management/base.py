"""What the operators' commands share: a database, words for errors, a question before the deed."""

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

from django_mq.exceptions import MQError
from django_mq.failures import one_line
from django_mq.management.output import as_json
from django_mq.queues import Changed
from django_mq.queues.connecting import alias_of

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class OperatorCommand(BaseCommand):
    """A command that asks or does something by `django_mq.queues`; subclasses write `operate`.

    Bad input and a database that cannot be asked are a CommandError: exit code 1.
    """

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="the database of the messages; default: the setting DATABASE, or the router's",
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
        """Do what the options say."""
        raise NotImplementedError

    def confirm(self, question: str, *, yes: bool, json: bool = False, **options: Any) -> bool:
        """Ask before a deed that cannot be undone.

        Without a terminal, and where the answer is to be JSON, only `--yes` will do.
        """
        if yes:
            return True
        if json or not sys.stdin.isatty():
            raise CommandError(f"{question} Say --yes to do it.")
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def agreed(self, question: str, *, yes: bool, as_json: bool) -> bool:
        """Ask whoever sits at a terminal before a deed that can be undone; not a script."""
        if yes or as_json or not sys.stdin.isatty():
            return True
        return self.confirm(question, yes=False)

    def report(
        self, deed: str, changed: Changed, *, json: bool, dry_run: bool, **options: Any
    ) -> None:
        """Print how many messages were changed and how many were skipped; in JSON, which."""
        if json:
            told = {"ids": changed.ids, "skipped": changed.skipped, "dry_run": dry_run}
            self.stdout.write(as_json(told))
            return
        skipped = f", skipped {changed.skipped:,} (in flight or changed)" if changed.skipped else ""
        self.stdout.write(f"{deed} {count(len(changed.ids))}{skipped}.")

    def nothing(self, text: str, found: Changed, *, json: bool, **options: Any) -> None:
        """Print that nothing was changed."""
        if json:
            self.report("", Changed((), found.skipped), json=True, **options)
        else:
            self.stdout.write(text)


def chosen_database(alias: str | None) -> str:
    """Return the alias of the messages' database; `alias`: what was asked for, if anything was.

    Raises CommandError where there is none, or one that is not PostgreSQL.
    """
    alias = alias_of(None) if alias is None else alias
    if alias not in connections:
        raise CommandError(f"no database {one_line(alias)!r}; there are {', '.join(connections)}")
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise CommandError(
            f"database {alias!r} is {connection.display_name}; django_mq works on PostgreSQL"
        )
    return alias


def must_be_migrated(connection: BaseDatabaseWrapper) -> None:
    """Raise CommandError where tables are missing, or are not those of this version."""
    executor = MigrationExecutor(connection)
    app = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "django_mq"]
    if executor.migration_plan(app):
        raise CommandError(
            f"the tables in database {connection.alias!r} are not up to date: run manage.py migrate"
        )


def count(n: int) -> str:
    """Return `n` messages, in words.

    >>> count(1), count(1200)
    ('1 message', '1,200 messages')
    """
    return f"{n:,} message{'' if n == 1 else 's'}"


def add_deed(parser: CommandParser) -> None:
    """Add the options of a command that decides something about a queue."""
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--yes", action="store_true", help="do not ask, at a terminal either")
    parser.add_argument("--json", action="store_true", help="say it in JSON; nothing is asked")


#: The options of `add_selection` that choose by what the messages have in common.
SELECTION = ("queue", "type", "handler", "key")


def add_selection(parser: CommandParser) -> None:
    """Add the options that say which dead letters are meant."""
    parser.add_argument("--queue", metavar="NAME", help="those of this queue")
    parser.add_argument("--type", metavar="TYPE", help="those of exactly this type")
    parser.add_argument("--handler", metavar="NAME", help="those of this handler")
    parser.add_argument("--key", metavar="KEY", help="those of this order key")
    parser.add_argument("--all", action="store_true", help="those of every queue and type")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N, longest dead first")
    parser.add_argument("--dry-run", action="store_true", help="only say how many there are")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="say it in JSON, with the ids")


def check_selection(chosen: Iterable[object], everything: bool) -> None:
    """Raise CommandError unless it was said which messages are meant, in one way."""
    some = any(each is not None for each in chosen)
    if not some and not everything:
        raise CommandError("say which: by --queue, --type or another option, or --all")
    if some and everything:
        raise CommandError("--all goes with no other choice")


def duration(text: str) -> float:
    """Read seconds, or a number with a unit, from the command line.

    >>> duration("90"), duration("1.5h"), duration("2d")
    (90.0, 5400.0, 172800.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)!r} is no duration: 90, 90s, 15m, 2h, 1d")
    return float(found[1]) * _UNITS[found[2]]


def moment(text: str) -> datetime:
    """Read an ISO 8601 moment; without an offset it is in the project's time zone."""
    try:
        found = parse_datetime(text.strip())
    except ValueError:
        found = None
    if found is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)!r} is no moment: 2026-12-24T18:00+01:00")
    return timezone.make_aware(found) if timezone.is_naive(found) else found
