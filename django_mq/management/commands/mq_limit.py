"""`mq_limit QUEUE N|none`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.arguments import whole_number
from django_mq.management.base import OperatorCommand, add_queue_options
from django_mq.management.output import as_json
from django_mq.policy.rounding import message_count
from django_mq.queues.decisions import MAX_IN_FLIGHT


class Command(OperatorCommand):
    needs_queue = True
    help = "Limit how many messages of a queue all workers have in flight; 0 stops all claims."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_queue_options(parser)
        parser.add_argument(
            "max_in_flight",
            type=limit_or_none,
            metavar="N|none",
            help="a number from 0, or none to return to the limit of the settings",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        queue, wanted, dry_run = options["queue"], options["max_in_flight"], options["dry_run"]
        self.must_be_known(database=database, **options)
        limit = queues.limit(queue, wanted, dry_run=True, using=database)
        words = "no limit" if limit is None else f"at most {message_count(limit)} in flight"
        if not dry_run:
            self.agree(f"Set the limit of queue {queue}: {words}?", **options)
            limit = queues.limit(queue, wanted, using=database)
        if options["json"]:
            answer = {"queue": queue, "max_in_flight": limit, "dry_run": dry_run}
            self.stdout.write(as_json(answer))
        elif dry_run:
            self.stdout.write(f"Queue {queue} would have {words}.")
        else:
            self.stdout.write(f"Queue {queue} has {words}. Running messages are not stopped.")


def limit_or_none(text: str) -> int | None:
    """Read a limit from the command line.

    >>> limit_or_none("25"), limit_or_none("none")
    (25, None)
    """
    if text.strip().lower() == "none":
        return None
    return whole_number(0, MAX_IN_FLIGHT, other=", or none")(text)
