"""`mq_requeue --id ID ... | [--queue NAME] [--type TYPE] | --all`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand, add_selection, check_selection, count


class Command(OperatorCommand):
    help = "Give dead letters more attempts, due now. Asks first, unless ids are named."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--id", type=int, nargs="+", action="extend", dest="ids", metavar="ID", help="these"
        )
        parser.add_argument(
            "--attempts", type=int, default=1, metavar="N", help="at least N more (default 1)"
        )
        add_selection(parser)

    def operate(self, *, database: str | None, **options: Any) -> None:
        ids = options["ids"]
        chosen = {name: options[name] for name in ("queue", "type", "limit")}
        check_selection(chosen["queue"], chosen["type"], options["all"], ids)
        found = queues.requeue(
            ids, attempts=options["attempts"], dry_run=True, using=database, **chosen
        )
        if options["dry_run"]:
            self.report("Would requeue", found)
            return
        question = f"Requeue {count(len(found.ids))}?"
        if not found or (ids is None and not self.confirm(question, yes=options["yes"])):
            self.stdout.write("Nothing was requeued.")
            return
        changed = queues.requeue(ids or found.ids, attempts=options["attempts"], using=database)
        self.report("Requeued", changed)
