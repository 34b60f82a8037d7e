"""`mq_replay --id ID ... | [--queue NAME] [--type TYPE] [--since MOMENT] ... [--to HANDLER]`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.exceptions import RoutingError
from django_mq.management.arguments import (
    limit,
    moment_or_ago,
    past_moment_or_ago,
    wrong_arguments,
)
from django_mq.management.base import OperatorCommand
from django_mq.management.selection import add_common_selection
from django_mq.policy.rounding import message_count
from django_mq.queues import Changed

#: The options that select messages.
SELECTION = ("ids", "queue", "type", "handler", "since", "until")


class Command(OperatorCommand):
    help = "Broadcast copies of handled messages, from the history, after a confirmation."
    role = "mq_admin"
    skipped = "not in the history, or not selected"
    none_found = (
        ": the history has no such message. It keeps what queues and handlers with the option"
        " history have handled"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_common_selection(parser)
        parser.add_argument(
            "--since",
            type=past_moment_or_ago,
            metavar="MOMENT|DURATION",
            help="messages handled at or after it, or within, for example, 1h",
        )
        parser.add_argument(
            "--until",
            type=moment_or_ago,
            metavar="MOMENT|DURATION",
            help="messages handled before it, or longer ago than, for example, 10m",
        )
        parser.add_argument(
            "--to", metavar="HANDLER", help="replay to this handler, not to the original ones"
        )
        parser.add_argument(
            "--limit", type=limit, metavar="N", help="at most N, the lowest ids first"
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        if all(options[name] is None for name in SELECTION):
            raise wrong_arguments(
                "select messages: by --id, --queue, --type, --handler, --since, or --until"
            )
        chosen = {name: options[name] for name in (*SELECTION, "to", "limit")}
        try:
            found = queues.replay(dry_run=True, using=database, **chosen)
        except RoutingError as error:  # the code here has no such handler
            raise wrong_arguments(str(error)) from error
        if not found:
            self.warn_of_unknown(database=database, **options)
        where = f" to {chosen['to']}" if chosen["to"] else ""
        question = f"Broadcast {message_count(len(found.ids))} again{where}?"

        def act() -> Changed:
            # The ids counted in the question: more messages may have been handled since.
            done = queues.replay(ids=found.ids, to=chosen["to"], using=database)
            return Changed(done.ids, found.skipped + done.skipped)

        self.change("replay", "replayed", question, found, act, **options)
