"""`mq_resume QUEUE [--backoff]`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand, add_deed
from django_mq.management.output import as_json


class Command(OperatorCommand):
    help = "End the pause of a queue and wake its workers. A backoff goes on: see --backoff."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_deed(parser)
        parser.add_argument(
            "--backoff", action="store_true", help="end its backoff; a pause goes on"
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        queue, dry_run = options["queue"], options["dry_run"]
        end, words, not_so = (
            (queues.end_backoff, "at its full rate again", "did not back off")
            if options["backoff"]
            else (queues.resume, "resumed", "was not paused")
        )
        ended = end(queue, dry_run=True, using=database)
        if ended and not dry_run:
            question = f"Let queue {queue} be {words}?"
            if not self.agreed(question, yes=options["yes"], as_json=options["json"]):
                self.stdout.write("Nothing was changed.")
                return
            ended = end(queue, using=database)
        if options["json"]:
            what = "backoff" if options["backoff"] else "pause"
            told = {"queue": queue, "what": what, "ended": ended, "dry_run": dry_run}
            self.stdout.write(as_json(told))
        else:
            verb = "would be" if dry_run else "is"
            self.stdout.write(f"Queue {queue} {f'{verb} {words}' if ended else not_so}.")
