"""`mq_routes TYPE [--metadata JSON]`."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, table
from django_mq.policy.routing import check_name


class Command(OperatorCommand):
    help = "Show which handlers a message type reaches, in which queues, and why."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("type", metavar="TYPE")
        parser.add_argument(
            "--metadata", default="{}", metavar="JSON", help='such as {"vip": true}'
        )
        parser.add_argument("--json", action="store_true")

    def operate(self, *, database: str | None, **options: Any) -> None:
        type = check_name(options["type"], "type")
        try:
            metadata = json.loads(options["metadata"])
        except (ValueError, RecursionError):
            metadata = None
        if not isinstance(metadata, dict):
            raise CommandError('--metadata must be a JSON object such as {"vip": true}')
        settings = get_settings()
        found = [
            {
                "handler": each.subscription.name,
                "queue": handlers.queue_of(each.subscription, settings),
                "gets_it": each.matches,
                "reason": each.reason,
            }
            for each in handlers.table().explain(type, metadata)
        ]
        if options["json"]:
            self.stdout.write(as_json(found))
            return
        if found:
            rows = [(*list(row.values())[:2], _yes(row["gets_it"]), row["reason"]) for row in found]
            self.stdout.write(table(("handler", "queue", "gets it", "why"), rows))
        if not any(row["gets_it"] for row in found):
            self.stdout.write(
                f"No handler registered here takes {type}: a message is stored once, in queue"
                f" {settings.default_queue}, and the worker that claims it routes it."
            )


def _yes(gets_it: object) -> str:
    return "yes" if gets_it else "no"
