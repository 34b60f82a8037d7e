"""Chores: what keeps the tables small. Any worker may do them; the fleet takes turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mq.messages import Delivery
from django_mq.states import GONE_AFTER
from django_mq.store import Cursor, chores
from django_mq.worker import reporting
from django_mq.worker.ending import Ended, Settled

if TYPE_CHECKING:
    from django_mq.conf import Settings

#: Seconds between two turns of the whole fleet.
EVERY = 10.0
#: Rows that one statement removes at most: no chore holds locks for long.
PIECE = 1000
#: Messages that expire at once: their payloads are read, for the signals.
FEW = 50


def run(cursor: Cursor, settings: Settings) -> None:
    """Do what is to be done, in pieces, if it is this worker's turn."""
    if not chores.take_turn(cursor, every=EVERY):
        return
    while expired := chores.expire(cursor, limit=FEW):
        for row in expired:
            reporting.one_ended(Ended(Delivery(row), Settled.BURIED, reason="expired"))
    if settings.attempt_retention is not None:
        chores.forget_attempts(cursor, older_than=settings.attempt_retention, limit=PIECE)
    if settings.result_retention is not None:
        chores.forget_results(cursor, older_than=settings.result_retention, limit=PIECE)
    chores.forget_workers(cursor, older_than=4 * GONE_AFTER.total_seconds())
    _forget_dead(cursor, settings)


def _forget_dead(cursor: Cursor, settings: Settings) -> None:
    names = {name for name in settings.queues if settings.queue(name).dead_retention is not None}
    if settings.dead_retention is not None:
        names.update(chores.dead_queues(cursor))
    for name in names:
        retention = settings.queue(name).dead_retention
        if retention is not None:
            chores.forget_dead(cursor, queue=name, older_than=retention, limit=PIECE)
