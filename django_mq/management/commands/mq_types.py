"""`mq_types [--json]`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mq import handlers
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, table
from django_mq.messages.classes import MessageClass, message_classes
from django_mq.messages.codecs import Unsupported
from django_mq.policy.routing import Pattern


class Command(OperatorCommand):
    help = "List the types that have a message class: version, class, handlers, JSON Schema."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--json", action="store_true", help="print JSON, with the JSON Schema of each type"
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        found: list[dict[str, Any]] = [
            {
                "type": each.type,
                "version": each.version,
                "class": f"{each.cls.__module__}.{each.cls.__qualname__}",
                "handlers": [
                    handler.name
                    for handler in handlers.all_handlers()
                    if any(Pattern(pattern).matches(each.type) for pattern in handler.patterns)
                ],
                "schema": _schema(each),
            }
            for each in message_classes()
        ]
        if options["json"]:
            self.stdout.write(as_json(found))
        elif not found:
            self.stdout.write("No class is registered: put @message(type) above a dataclass.")
        else:
            rows = [
                (
                    each["type"],
                    each["version"],
                    each["class"],
                    ", ".join(each["handlers"]) or "none",
                )
                for each in found
            ]
            self.stdout.write(table(("type", "version", "class", "handlers"), rows))


def _schema(known: MessageClass) -> dict[str, Any]:
    """Return the JSON Schema of a class; raises CommandError for E012, which no check has found."""
    try:
        return known.codec.schema()
    except Unsupported as error:
        text = f"the message class of {known.type} cannot be stored: {error}"
        raise CommandError(text) from error
