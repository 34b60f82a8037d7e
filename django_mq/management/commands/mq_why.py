"""`mq_why ID`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.arguments import message_id
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json
from django_mq.policy.plain_text import one_line


class Command(OperatorCommand):
    help = "Explain why a message is not running now, or how it ended."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("id", type=message_id, metavar="ID", help="id of the message")

    def operate(self, *, database: str | None, **options: Any) -> None:
        answer = queues.why(options["id"], using=database)
        self.stdout.write(as_json(answer) if options["json"] else one_line(str(answer), 4096))
