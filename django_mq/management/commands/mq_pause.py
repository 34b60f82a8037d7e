"""`mq_pause QUEUE [--until MOMENT | --for DURATION]`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.conf.local_time import local_text
from django_mq.management.arguments import duration, moment
from django_mq.management.base import OperatorCommand, add_queue_options
from django_mq.management.output import as_json


class Command(OperatorCommand):
    needs_queue = True
    help = "Stop workers from claiming from a queue, for a time or until mq_resume."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_queue_options(parser)
        end = parser.add_mutually_exclusive_group()
        end.add_argument(
            "--until",
            type=moment,
            metavar="MOMENT",
            help="pause until then, such as 2026-12-24T18:00",
        )
        end.add_argument(
            "--for",
            type=duration,
            dest="seconds",
            metavar="DURATION",
            help="pause for this long, such as 15m or 2h",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        queue, dry_run = options["queue"], options["dry_run"]
        self.must_be_known(database=database, **options)
        until = options["seconds"] if options["until"] is None else options["until"]
        end = queues.pause(queue, until=until, dry_run=True, using=database)
        if not dry_run:
            self.agree(f"Pause queue {queue} {_words(end)}?", **options)
            end = queues.pause(queue, until=until, using=database)
        if options["json"]:
            answer = {"queue": queue, "paused": True, "until": end, "dry_run": dry_run}
            self.stdout.write(as_json(answer))
        elif dry_run:
            self.stdout.write(f"Queue {queue} would be paused {_words(end)}.")
        else:
            text = f"Queue {queue} is paused {_words(end)}. Running messages are not stopped."
            self.stdout.write(text)


def _words(end: datetime | None) -> str:
    return "until mq_resume" if end is None else f"until {local_text(end)}"
