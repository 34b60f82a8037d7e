"""`mq_purge --id ID ... | [--queue NAME] [--key KEY] [--older-than DURATION] ... | --all`."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.arguments import duration
from django_mq.management.selection import SelectionCommand
from django_mq.policy.rounding import message_count


class Command(SelectionCommand):
    help = "Remove dead letters, after a confirmation. Messages in flight are never removed."
    role = "mq_operator, or for Django's tasks mq_admin"
    none_found = ": no dead letter matches; --waiting also removes those that wait"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
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
        waiting = options["waiting"]
        chosen = self.selection(options)
        chosen |= {"older_than": options["older_than"], "waiting": waiting}
        found = queues.purge(dry_run=True, using=database, **chosen)
        count = len(found.ids)
        if waiting:
            self.none_found = ""
            question = f"Remove {message_count(count)} permanently, dead or waiting?"
        else:
            letters = "dead letter" if count == 1 else "dead letters"
            question = f"Remove {count:,} {letters} permanently?"
        if chosen["ids"] is None:
            chosen["limit"] = count  # leave out messages that died since the question
        act = partial(queues.purge, using=database, **chosen)
        self.change("remove", "removed", question, found, act, database=database, **options)
