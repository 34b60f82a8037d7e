"""`mq_purge [--queue NAME] [--type TYPE] [--older-than DURATION] | --all`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import (
    OperatorCommand,
    add_selection,
    check_selection,
    count,
    duration,
)


class Command(OperatorCommand):
    help = "Remove dead letters. Asks first; messages in flight are never touched."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_selection(parser)
        parser.add_argument(
            "--older-than", type=duration, metavar="DURATION", help="dead for longer: 12h, 30d"
        )
        parser.add_argument(
            "--waiting",
            action="store_true",
            help="also messages that never ran to their end: due, delayed, retrying, held, blocked",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        names = ("queue", "type", "limit", "older_than", "waiting")
        chosen = {name: options[name] for name in names}
        check_selection(chosen["queue"], chosen["type"], options["all"])
        found = queues.purge(dry_run=True, using=database, **chosen)
        if options["dry_run"]:
            self.report("Would remove", found)
            return
        what = "messages, waiting ones too" if chosen["waiting"] else "dead letters"
        question = f"Remove {count(len(found.ids))} ({what}) for good?"
        if not found or not self.confirm(question, yes=options["yes"]):
            self.stdout.write("Nothing was removed.")
            return
        chosen["limit"] = len(found.ids)  # not what died while the question was read
        self.report("Removed", queues.purge(using=database, **chosen))
