"""`mq_requeue --id ID ... | [--queue NAME] [--fingerprint HASH] ... | --all`."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.arguments import whole_number
from django_mq.management.selection import SelectionCommand
from django_mq.policy.rounding import message_count
from django_mq.queues.actions import MAX_ADDED_ATTEMPTS


class Command(SelectionCommand):
    help = "Give dead letters more attempts, due now. Asks for confirmation unless --id is given."
    skipped = "in flight, changed, or of a unique id that is taken"
    none_found = ": no dead letter matches; for those that wait, see mq_run_now"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--attempts",
            type=whole_number(1, MAX_ADDED_ATTEMPTS),
            default=1,
            metavar="N",
            help="give at least N more attempts (default 1)",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        attempts, ids = options["attempts"], options["ids"]
        chosen = self.selection(options)
        found = queues.requeue(attempts=attempts, dry_run=True, using=database, **chosen)
        question = f"Requeue {message_count(len(found.ids))}?" if ids is None else None
        act = partial(queues.requeue, ids or found.ids, attempts=attempts, using=database)
        self.change("requeue", "requeued", question, found, act, database=database, **options)
