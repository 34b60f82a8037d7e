"""`mq_stop ID...`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.conf import alias_of
from django_mq.management.arguments import login, message_id
from django_mq.management.base import Declined, OperatorCommand
from django_mq.management.selection import notes_on_others
from django_mq.models import QueuedMessage
from django_mq.policy.rounding import message_count
from django_mq.queues import Changed
from django_mq.states import MessageState

NEIGHBOURS = (
    "Unless it is a coroutine, its process ends, and other messages that run there outside a"
    " transaction lose their attempt."
)


class Command(OperatorCommand):
    help = "Stop running messages: cancel a coroutine, or end the worker process as at a timeout."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "ids", type=message_id, nargs="+", metavar="ID", help="ids of the messages"
        )
        parser.add_argument("--by", metavar="NAME", help="who stops them (default: the login)")
        parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")

    def operate(self, *, database: str | None, **options: Any) -> None:
        ids, by = options["ids"], options["by"]
        if not _are_in_flight(ids, database):
            self._report(Changed((), len(set(ids))), database, options)
            return
        question = f"Stop {message_count(len(set(ids)))}? The attempt fails. {NEIGHBOURS}"
        if not self.confirm(question, **options):
            raise Declined
        asked = queues.stop(ids, by=login() if by is None else by, using=database)
        self._report(asked, database, options)

    def _report(self, asked: Changed, database: str | None, options: dict[str, Any]) -> None:
        in_flight = MessageState.RUNNING, MessageState.LEASED
        self.note(notes_on_others(options["ids"], asked, database, in_flight))
        if options["json"]:
            self.report("", asked, dry_run=False, **options)
        elif asked:
            self.stdout.write(f"Asked the workers to stop {message_count(len(asked.ids))}.")
        else:
            self.stdout.write("No live worker has any of these messages: there is nothing to stop.")


def _are_in_flight(ids: Sequence[int], database: str | None) -> bool:
    """Return whether a worker has any of these messages."""
    found = QueuedMessage.objects.using(alias_of(database)).filter(leased_until__isnull=False)
    return found.filter(pk__in=ids).exists()
