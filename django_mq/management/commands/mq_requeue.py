"""`mq_requeue --id ID ... | [--queue NAME] [--fingerprint HASH] ... | --all`."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand
from django_mq.management.selection import (
    SELECTION,
    add_all,
    add_selection,
    check_selection,
    notes_on_others,
)
from django_mq.policy.rounding import message_count


class Command(OperatorCommand):
    help = "Give dead letters more attempts, due now. Asks for confirmation unless --id is given."
    skipped = "in flight, changed, or of a unique id that is taken"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_selection(parser)
        add_all(parser)
        parser.add_argument(
            "--attempts",
            type=int,
            default=1,
            metavar="N",
            help="give at least N more attempts (default 1)",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        ids = options["ids"]
        check_selection(options)
        chosen = {name: options[name] for name in (*SELECTION, "limit")}
        found = queues.requeue(
            ids, attempts=options["attempts"], dry_run=True, using=database, **chosen
        )
        if ids is not None:
            self.note(notes_on_others(ids, found, database))
        elif not found:
            self.none_found = ": no dead letter matches; for those that wait, see mq_run_now"
            self.warn_of_unknown(database=database, **options)
        question = f"Requeue {message_count(len(found.ids))}?" if ids is None else None
        wanted = ids or found.ids
        act = partial(queues.requeue, wanted, attempts=options["attempts"], using=database)
        self.change("requeue", "requeued", question, found, act, **options)
