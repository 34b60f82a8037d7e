"""`mq_resume QUEUE`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand


class Command(OperatorCommand):
    help = "End the pause of a queue and wake its workers."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("queue", metavar="QUEUE")

    def operate(self, *, database: str | None, **options: Any) -> None:
        queue = options["queue"]
        was_paused = queues.resume(queue, using=database)
        self.stdout.write(f"Queue {queue} {'is resumed' if was_paused else 'was not paused'}.")
