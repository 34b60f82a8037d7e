"""Chores: what keeps the tables small. Any worker may do them; the fleet takes turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mq.messages import Delivery
from django_mq.signals import announce_queue, queue_deep
from django_mq.states import GONE_AFTER
from django_mq.store import Cursor, census, chores, freeing, keys
from django_mq.worker import consequences, freed, reporting
from django_mq.worker.ending import Ended, Settled, within_transaction

if TYPE_CHECKING:
    from django_mq.conf import Settings

#: Seconds between two turns of the whole fleet.
EVERY = 10.0
#: Rows that one statement removes at most: no chore holds locks for long.
PIECE = 1000
#: Statements of one kind in a turn, where one may not be enough.
MOST_PIECES = 20
#: A queue that is too deep is counted so far, for the words of the warning.
MOST_COUNTED = 10_000
#: Messages that expire at once: their payloads are read, for the signals.
FEW = 50


def run(cursor: Cursor, settings: Settings) -> bool:
    """Do what is to be done, in pieces, if it is this worker's turn; return whether it is."""
    if not chores.take_turn(cursor, every=EVERY):
        return False
    while expired := _expire(cursor):
        for each in expired:
            reporting.one_ended(each)
    if settings.attempt_retention is not None:
        chores.forget_attempts(cursor, older_than=settings.attempt_retention, limit=PIECE)
    if settings.result_retention is not None:
        for _ in range(MOST_PIECES):  # there may be as many as there were questions
            if (
                chores.forget_results(cursor, older_than=settings.result_retention, limit=PIECE)
                < PIECE
            ):
                break
    skipping = [name for name, queue in settings.queues.items() if queue.on_dead_head == "skip"]
    keys.free_stranded(cursor, skipping=skipping, limit=PIECE)
    _warn_of_deep(cursor, settings)
    freed.mend(cursor)
    freeing.forget_quiet(cursor, limit=PIECE)
    chores.forget_workers(cursor, older_than=4 * GONE_AFTER.total_seconds())
    _forget_dead(cursor, settings)
    return True


def _expire(cursor: Cursor) -> list[Ended]:
    with within_transaction(cursor):
        ended = [
            Ended(Delivery(row), Settled.BURIED, reason="expired")
            for row in chores.expire(cursor, limit=FEW)
        ]
        consequences.follow(cursor, ended)
    return ended


def _warn_of_deep(cursor: Cursor, settings: Settings) -> None:
    """Say once in a while, for the whole fleet, that more messages wait than should."""
    depths = {name: settings.queue(name).warn_depth for name in census.names(cursor)}
    limits = {name: depth + 1 for name, depth in depths.items() if depth}
    waiting = _count(cursor, limits)
    for name in sorted(name for name, count in waiting.items() if count > depths[name]):
        if not chores.take_warning(cursor, queue=name, every=settings.queue(name).warn_every):
            continue
        most = max(MOST_COUNTED, limits[name])
        count = _count(cursor, {name: most})[name]
        more = "at least " if count >= most else ""
        announce_queue(
            queue_deep,
            name,
            f"has {more}{count:,} waiting messages, more than its warn_depth of {depths[name]:,}",
            depth=count,
            warn_depth=depths[name],
        )


def _count(cursor: Cursor, limits: dict[str, int]) -> dict[str, int]:
    with within_transaction(cursor):
        return chores.count_waiting(cursor, limits) if limits else {}


def _forget_dead(cursor: Cursor, settings: Settings) -> None:
    names = {name for name in settings.queues if settings.queue(name).dead_retention is not None}
    if settings.dead_retention is not None:
        names.update(chores.dead_queues(cursor))
    for name in names:
        retention = settings.queue(name).dead_retention
        if retention is not None:
            chores.forget_dead(cursor, queue=name, older_than=retention, limit=PIECE)
