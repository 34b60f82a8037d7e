"""`mq_run_now --id ID ... | [--queue NAME] [--type TYPE] [--fingerprint HASH] ...`."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import OperatorCommand
from django_mq.management.selection import (
    SELECTION,
    add_selection,
    check_selection,
    notes_on_others,
)
from django_mq.policy.rounding import message_count
from django_mq.queues import Changed
from django_mq.states import MessageState

LATER = (MessageState.DELAYED, MessageState.RETRYING, MessageState.HELD)


class Command(OperatorCommand):
    help = (
        "Make delayed, retrying and held messages due now. Asks for confirmation unless --id is"
        " given."
    )
    skipped = "due, in flight, dead, expired, or behind another message of their key"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_selection(parser, order="first due first")

    def operate(self, *, database: str | None, **options: Any) -> None:
        ids = options["ids"]
        check_selection(options)
        chosen = {name: options[name] for name in (*SELECTION, "limit")}
        found = queues.run_now(ids, dry_run=True, using=database, **chosen)
        if ids is not None:
            self.note(notes_on_others(ids, found, database, LATER))
        elif not found:
            self.none_found = ": nothing that waits for a time matches; for dead ones, mq_requeue"
            self.warn_of_unknown(database=database, **options)
        question = f"Run {message_count(len(found.ids))} now?" if ids is None else None
        act = partial(self._run_now, found, database)
        self.change("make due", "made due", question, found, act, **options)

    def _run_now(self, found: Changed, database: str | None) -> Changed:
        changed = queues.run_now(found.ids, using=database)
        return Changed(changed.ids, changed.skipped + found.skipped)
