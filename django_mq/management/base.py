"""The base of the operator commands: error texts, confirmation and reports."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import TextIOWrapper
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper
from django.db import DatabaseError

from django_mq import handlers, queues
from django_mq.exceptions import MQError
from django_mq.executor.connections import converting_failures, without_pool
from django_mq.handlers.nearest import has_subscriber, nearest_handlers, nearest_types
from django_mq.management.arguments import OneQueue, wrong_arguments
from django_mq.management.databases import (
    UNUSABLE,
    add_database,
    chosen_database,
    limited_waits,
    refusal,
)
from django_mq.management.interruption import interruptible
from django_mq.management.output import as_json
from django_mq.policy.names import check_name
from django_mq.policy.plain_text import one_line
from django_mq.policy.rounding import message_count
from django_mq.policy.similar_names import similar
from django_mq.queues import Changed
from django_mq.queues.known_queues import unknown_queue_warning
from django_mq.supervisor.output import discard

#: The errors of a disk that takes nothing more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: The maximum number of messages whose ids a report lists.
MAX_NAMED = 10


class Declined(Exception):
    """The operator answered a question at the terminal with no."""


class OperatorCommand(BaseCommand):
    """A command that calls `django_mq.queues`; subclasses write `operate`.

    Wrong arguments become a CommandError with exit code 2, database errors one with 1.
    """

    #: Whether the command concerns one queue.
    needs_queue = False
    #: The actions that the first word may name, the default first.
    actions: Sequence[str] = ()
    #: The role of docs/roles.md that allows the command.
    role = "mq_operator"
    #: Why messages are skipped.
    skipped = "in flight or changed"
    #: Why nothing matches, if there is more to say: the end of a sentence.
    none_found = ""

    def create_parser(self, *args: Any, **kwargs: Any) -> CommandParser:
        """Return a parser that accepts options between QUEUE and a word that follows it."""
        parser = super().create_parser(*args, **kwargs)
        parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        add_database(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        if self.actions:
            default = self.actions[0]
            parser.add_argument(
                "action",
                nargs="?",
                choices=self.actions,
                default=default,
                help=f"default: {default}",
            )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command as a program; a signal ends it without a traceback."""
        if sys.stdout is None:  # a daemon has closed it
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
            self.stdout = OutputWrapper(sys.stdout)
        if isinstance(sys.stdout, TextIOWrapper):  # escape what its encoding lacks, as stderr does
            sys.stdout.reconfigure(errors="backslashreplace")
        with interruptible():
            super().run_from_argv(argv)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command; an output that takes nothing more ends it without a traceback.

        A closed pipe, as with `head`, ends it silently.
        """
        try:
            try:
                return super().execute(*args, **options)
            finally:  # before an exit code, too: the interpreter's flush would change it to 120
                if sys.stdout is not None:
                    sys.stdout.flush()
        except BrokenPipeError:
            discard(sys.stdout)
            raise SystemExit(1) from None
        except OSError as error:
            if error.errno not in FULL:
                raise
            discard(sys.stdout)
            raise CommandError(f"the output cannot be written: {error.strerror}") from error

    def handle(self, *args: Any, **options: Any) -> None:
        named = options.pop("named_queue", None)
        if named is not None and options.get("queue") is not None:
            raise wrong_arguments("name the queue once: as QUEUE or by --queue")
        if named is not None:
            options["queue"] = named
        if self.actions and options["action"] not in self.actions:  # call_command(action=...)
            known = ", ".join(self.actions)
            raise wrong_arguments(f"no action is {options['action']!r}: choose one of {known}")
        if self.needs_queue and options["queue"] is None:
            raise wrong_arguments("name a queue, as QUEUE or by --queue")
        alias = ""  # until one is chosen
        try:
            alias = chosen_database(options.setdefault("database", None))
            if self.needs_queue:
                check_name(options["queue"], "queue")
            with without_pool(alias), converting_failures(alias), limited_waits(alias):
                self.operate(**options)
        except Declined:
            self.stdout.write("Nothing was changed.")
        except (MQError, ValueError, DatabaseError, *UNUSABLE) as error:
            raise refusal(error, alias, self.role) from error

    def operate(self, *, database: str | None, **options: Any) -> None:
        """Run the command with its parsed options."""
        raise NotImplementedError

    def confirm(self, question: str, *, yes: bool, json: bool = False, **options: Any) -> bool:
        """Ask for confirmation of an action that cannot be undone.

        Without a terminal, or with JSON output, `--yes` is required.
        """
        if yes:
            return True
        if json or not _at_terminal():
            raise CommandError(f"{question} Pass --yes to confirm.")
        return _typed(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def warn_of_unknown(
        self,
        *,
        queue: str | None,
        database: str | None,
        handler: str | None = None,
        type: str | None = None,
        **options: Any,
    ) -> None:
        """Print a warning if `queue`, `handler` or `type` is unknown: it may be misspelled."""
        warnings = []
        if queue is not None:
            warnings.append(unknown_queue_warning(queue, queues.names(using=database)))
        if handler is not None and handlers.get(handler) is None:
            warnings.append(f"no handler here is {handler!r}{nearest_handlers(handler)}")
        if type is not None and not has_subscriber(type):
            warnings.append(f"no handler here takes {type!r}{nearest_types(type)}")
        self.note(filter(None, warnings))

    def note(self, texts: Iterable[str]) -> None:
        """Print remarks in addition to the answer."""
        for text in texts:
            self.stderr.write(self.style.WARNING(f"Note: {text}"))

    def agree(self, question: str, *, yes: bool, json: bool, **options: Any) -> None:
        """Ask for confirmation of an action that can be undone, but only at a terminal.

        Raises Declined.
        """
        if not (yes or json) and _at_terminal() and not self.confirm(question, yes=False):
            raise Declined

    def must_be_known(
        self,
        *,
        queue: str,
        force: bool,
        yes: bool,
        json: bool,
        database: str | None,
        **options: Any,
    ) -> None:
        """Ask before changing a queue that is unknown here: its name may be misspelled.

        Without a terminal this raises CommandError; with `force` it does nothing.
        """
        if force or queue in (known := queues.names(using=database)):
            return
        near = similar(queue, known)
        text = f"queue {one_line(queue)} is not known: no messages, settings or handlers name it."
        if near:
            text += f" Did you mean {' or '.join(near)}?"
        if yes or json or not _at_terminal():
            raise CommandError(f"{text} Pass --force to change it anyway.")
        if not self.confirm(f"{text} Change it anyway?", yes=False):
            raise CommandError("nothing was changed")

    def report(
        self, verb: str, changed: Changed, *, json: bool, dry_run: bool, **options: Any
    ) -> None:
        """Print how many messages were changed and skipped; in JSON, the ids as well.

        A few that a `--limit` picked are named, so that the operator can ask `mq_why` about them.
        """
        if json:
            answer = {"ids": changed.ids, "skipped": changed.skipped, "dry_run": dry_run}
            self.stdout.write(as_json(answer))
            return
        skipped = f", skipped {changed.skipped:,} ({self.skipped})" if changed.skipped else ""
        reason = self.none_found if dry_run and not changed else ""
        is_sample = options.get("limit") is not None and 0 < len(changed.ids) <= MAX_NAMED
        named = f" ({', '.join(map(str, changed.ids))})" if is_sample else ""
        self.stdout.write(f"{verb} {message_count(len(changed.ids))}{named}{skipped}{reason}.")

    def change(
        self,
        do: str,
        done: str,
        question: str | None,
        found: Changed,
        act: Callable[[], Changed],
        **options: Any,
    ) -> None:
        """Ask the `question`, if there is one, then `act()`; print how many messages were changed.

        `found` has the messages that `act` would try. `do` and `done` are forms of the verb.
        """
        if options["dry_run"]:
            self.report(f"Would {do}", found, **options)
        elif found and (question is None or self.confirm(question, **options)):
            self.report(done.capitalize(), act(), **options)
        elif options["json"]:
            self.report("", Changed((), found.skipped), **options)
        else:
            self.stdout.write(f"Nothing was {done}{'' if found else self.none_found}.")


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None: a supervisor has closed it


def _typed(question: str) -> str:
    """Return what the operator types at the terminal; Ctrl-D counts as no answer.

    If the output goes elsewhere, the question goes to stderr, since nobody sees a question in a
    file.
    """
    with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):
        try:
            return input(question)
        except EOFError:
            sys.stdout.write("\n")
            return ""


def add_queue(parser: CommandParser) -> None:
    """Add the two spellings of a queue's name; `handle` merges them into one option."""
    parser.add_argument("queue", metavar="QUEUE", nargs="?", help="name of the queue")
    parser.add_argument(
        "--queue", action=OneQueue, metavar="QUEUE", dest="named_queue", help="the same as QUEUE"
    )


def add_queue_options(parser: CommandParser) -> None:
    """Add the options of a command that changes one queue."""
    add_queue(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and stop")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--force", action="store_true", help="also change a queue that is unknown here"
    )
