"""`mq_pause QUEUE [--until MOMENT | --for DURATION]`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand, duration, moment
from django_mq.queues.obstacles import shown


class Command(OperatorCommand):
    help = "Let no worker claim from a queue, for a while or until mq_resume."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("queue", metavar="QUEUE")
        end = parser.add_mutually_exclusive_group()
        end.add_argument("--until", type=moment, metavar="MOMENT", help="such as 2026-12-24T18:00")
        end.add_argument("--for", type=duration, dest="seconds", metavar="DURATION", help="15m, 2h")

    def operate(self, *, database: str | None, **options: Any) -> None:
        queue, until, seconds = options["queue"], options["until"], options["seconds"]
        end = queues.pause(queue, until=seconds if until is None else until, using=database)
        words = "until mq_resume" if end is None else f"until {shown(end)}"
        self.stdout.write(f"Queue {queue} is paused {words}. What is claimed already still runs.")
