"""`mq_errors [--queue NAME] [--since DURATION] [--limit N]`: failed attempts by fingerprint."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.arguments import duration
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, table
from django_mq.queues.obstacles import shown


class Command(OperatorCommand):
    help = "List failed attempts in groups of the same error class, handler and place in the code."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--queue", metavar="NAME", help="only attempts of this queue")
        parser.add_argument(
            "--since",
            type=duration,
            metavar="DURATION",
            help="only attempts that ended within, for example, 1h or 7d",
        )
        parser.add_argument(
            "--limit", type=int, default=20, metavar="N", help="at most N groups (default 20)"
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        found = queues.errors(
            options["since"], options["queue"], limit=options["limit"], using=database
        )
        if not found:
            self.warn_of_unknown(options["queue"], database)
        if options["json"]:
            self.stdout.write(as_json(found))
        elif not found:
            asked = options["since"] is not None or options["queue"] is not None
            self.stdout.write(
                "No failed attempt matches." if asked else "No failed attempts are kept."
            )
        else:
            headers = ("fingerprint", "count", "dead", "waiting", "last", "error", "handler", "at")
            rows = (
                (
                    each.fingerprint,
                    each.count,
                    each.dead,
                    each.waiting,
                    shown(each.last),
                    each.error_class,
                    each.handler or "-",
                    each.place or "-",
                )
                for each in found
            )
            self.stdout.write(table(headers, rows))
