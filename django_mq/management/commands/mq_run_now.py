"""`mq_run_now --id ID ... | [--queue NAME] [--type TYPE] [--fingerprint HASH] ...`."""

from __future__ import annotations

from functools import partial
from typing import Any

from django_mq import queues
from django_mq.management.selection import SelectionCommand
from django_mq.policy.rounding import message_count
from django_mq.queues import Changed
from django_mq.states import MessageState


class Command(SelectionCommand):
    help = (
        "Make delayed, retrying and held messages due now. Asks for confirmation unless --id is"
        " given."
    )
    order = "first due first"
    selects_all = False
    wanted = (MessageState.DELAYED, MessageState.RETRYING, MessageState.HELD)
    skipped = "due, in flight, dead, expired, or behind another message of their key"
    none_found = ": nothing that waits for a time matches; for dead ones, mq_requeue"

    def operate(self, *, database: str | None, **options: Any) -> None:
        found = queues.run_now(dry_run=True, using=database, **self.selection(options))
        question = f"Run {message_count(len(found.ids))} now?" if options["ids"] is None else None
        act = partial(self._run_now, found, database)
        self.change("make due", "made due", question, found, act, database=database, **options)

    def _run_now(self, found: Changed, database: str | None) -> Changed:
        changed = queues.run_now(found.ids, using=database)
        return Changed(changed.ids, changed.skipped + found.skipped)
