"""`mq_purge --id ID ... | [--queue NAME] [--key KEY] [--older-than DURATION] ... | --all`."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.arguments import duration
from django_mq.management.base import OperatorCommand
from django_mq.management.selection import (
    SELECTION,
    add_all,
    add_selection,
    check_selection,
    notes_on_others,
)
from django_mq.policy.rounding import message_count


class Command(OperatorCommand):
    help = "Remove dead letters, after a confirmation. Messages in flight are never removed."
    role = "mq_operator, or for Django's tasks mq_admin"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_selection(parser)
        add_all(parser)
        parser.add_argument(
            "--older-than",
            type=duration,
            metavar="DURATION",
            help="only messages dead for longer than, for example, 12h or 30d",
        )
        parser.add_argument(
            "--waiting",
            action="store_true",
            help="also remove messages that are due, delayed, retrying, held or blocked",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        names = (*SELECTION, "ids", "limit", "older_than", "waiting")
        check_selection(options)
        chosen = {name: options[name] for name in names}
        found = queues.purge(dry_run=True, using=database, **chosen)
        if chosen["ids"] is not None:
            self.note(notes_on_others(chosen["ids"], found, database))
        elif not found:
            if not chosen["waiting"]:
                self.none_found = ": no dead letter matches; --waiting also removes those that wait"
            self.warn_of_unknown(database=database, **options)
        count = len(found.ids)
        if chosen["waiting"]:
            question = f"Remove {message_count(count)} permanently, dead or waiting?"
        else:
            letters = "dead letter" if count == 1 else "dead letters"
            question = f"Remove {count:,} {letters} permanently?"
        if chosen["ids"] is None:
            chosen["limit"] = count  # leave out messages that died since the question
        act = partial(queues.purge, using=database, **chosen)
        self.change("remove", "removed", question, found, act, **options)
