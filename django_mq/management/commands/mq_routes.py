"""`mq_routes [TYPE] [--metadata JSON]`."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandParser

from django_mq import handlers, queues
from django_mq.conf import get_settings
from django_mq.handlers import Handler
from django_mq.handlers.nearest import has_subscriber, nearest_types
from django_mq.handlers.typed import refusal
from django_mq.management.arguments import wrong_arguments
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, table
from django_mq.messages.classes import class_of_type
from django_mq.policy.names import check_name
from django_mq.policy.routing import TASKS, Explanation


class Command(OperatorCommand):
    help = (
        "Show which handlers a message type reaches, in which queues, and why. Without a type: all"
        " known types and handlers, the types without a handler, and the handlers not called."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("type", nargs="?", metavar="TYPE", help="a type (default: all)")
        parser.add_argument("--metadata", metavar="JSON", help='such as {"vip": true}')

    def operate(self, *, database: str | None, **options: Any) -> None:
        if options["type"] is None:
            if options["metadata"] is not None:
                raise wrong_arguments("--metadata belongs to one message: name its type, too")
            self._show_all(queues.topology(using=database), json=options["json"])
            return
        type = check_name(options["type"], "type")
        try:
            metadata = json.loads(options["metadata"] or "{}")
        except (ValueError, RecursionError):
            metadata = None
        if not isinstance(metadata, dict):
            raise wrong_arguments('--metadata must be a JSON object such as {"vip": true}')
        self._show_one(type, metadata, json=options["json"])

    def _show_one(self, type: str, metadata: dict[str, Any], *, json: bool) -> None:
        settings = get_settings()
        known = class_of_type(type)
        version = known.version if known else 1
        if type.startswith(TASKS):
            handlers.get(type.removeprefix(TASKS))  # registers a task of another package's backend
        explained = handlers.table().explain(type, metadata)
        found = [
            {
                "handler": each.subscription.name,
                "queue": handlers.queue_of(each.subscription, settings),
                "gets_it": each.matches,
                "reason": _reason(each, type, version),
            }
            for each in sorted(explained, key=lambda each: not each.matches)
            if each.matches or each.subscription.patterns  # not the tasks that it does not name
        ]
        if json:
            self.stdout.write(as_json(found))
            return
        if found:
            rows = [
                (row["handler"], row["queue"], "yes" if row["gets_it"] else "no", row["reason"])
                for row in found
            ]
            self.stdout.write(table(("handler", "queue", "gets it", "why"), rows))
        if not any(row["gets_it"] for row in found):
            self.stdout.write(_unrouted(type, settings.default_queue))

    def _show_all(self, found: queues.Topology, *, json: bool) -> None:
        if json:
            told = {
                "types": found.types,
                "handlers": found.handlers,
                "unheard": [each.type for each in found.unheard],
                "idle": [each.name for each in _idle(found)],
                "uncalled": [each.name for each in found.uncalled],
                "tasks": found.tasks,
            }
            self.stdout.write(as_json(told))
            return
        of = {each.name: each for each in found.handlers}
        rows = [
            (
                each.type,
                f"{each.messages}, held" if each.held else each.messages,
                name or "none",
                ", ".join(of[name].queues) if name else "-",
            )
            for each in found.types
            for name in each.handlers or ("",)
        ]
        if rows:
            self.stdout.write(table(("type", "newest messages", "handler", "queues"), rows))
        for label, names in (
            (
                "Handlers that take none of these types",
                [f"{each.name} ({', '.join(each.patterns)})" for each in _idle(found)],
            ),
            ("Types that no handler here takes", [each.type for each in found.unheard]),
            (
                "Handlers without a counted call in the last 7 days",
                [each.name for each in found.uncalled],
            ),
            ("Tasks, which only enqueue() reaches", found.tasks),
        ):
            if names:
                self.stdout.write(f"{label}: {', '.join(names)}")
        if not (rows or found.handlers or found.tasks):
            self.stdout.write("No handler is registered, and no message is stored.")


def _unrouted(type: str, queue: str) -> str:
    """Return what happens to a message of `type`, which no handler here gets."""
    if type.startswith(TASKS):
        return (
            f"No task registered here has the type {type}{nearest_types(type)}: workers hold its"
            " messages until their code has the task."
        )
    remark = " with this metadata" if has_subscriber(type) else nearest_types(type)
    return (
        f"No handler registered here takes {type}{remark}: a message is stored once, in queue"
        f" {queue}, and the worker that claims it routes it."
    )


def _reason(found: Explanation[Handler], type: str, version: int) -> str:
    """Return why a handler gets a message or not, and why it would hold this version."""
    refused = refusal(found.subscription, type, version) if found.matches else ""
    return f"{found.reason}, but held: {refused}" if refused else found.reason


def _idle(found: queues.Topology) -> list[queues.Subscriber]:
    heard = {name for each in found.types for name in each.handlers}
    return [each for each in found.handlers if each.name not in heard]
