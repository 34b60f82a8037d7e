"""Chores: keep the tables small, and repair the outcomes of races. Workers take turns.

A chore is done in pieces: transactions that walk over a bounded number of rows. A turn has a fixed
number of pieces per chore. The position of each walk is stored, and the next turn resumes there, on
any worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg

from django_mq.conf import Settings
from django_mq.conf.error_logs import error_name, log_failure
from django_mq.executor.statements import skip_refused_rows, within_transaction
from django_mq.signals import announce_queue, queue_deep
from django_mq.store import (
    Cursor,
    chores,
    keys,
    message_changes,
    notify,
    promotion,
    pruning,
    put_aside,
)
from django_mq.store.conditions import BEGINNING
from django_mq.store.limits import Limits
from django_mq.store.server_errors import LOST
from django_mq.store.unique_ids import UniqueId
from django_mq.worker import expiring, retention, vacuum
from django_mq.worker.retention import PIECE_ROWS

logger = logging.getLogger("django_mq")

#: Seconds between two turns of the whole fleet: slightly below the heartbeat interval, because each
#: heartbeat reads the time of the last turn.
TURN_SECONDS = 9.0
#: The number of one-message pieces that replace a piece which the database refuses.
SINGLE_MESSAGE_PIECES = 50
#: The unique ids whose put-aside messages one transaction promotes.
PIECE_UNIQUE_IDS = 100
#: The queues that one piece examines.
PIECE_QUEUES = 100
#: The count of a queue stops here; the warning shows that count.
MAX_COUNTED = 10_000
#: Seconds that a vacuum may take. Its work is not lost if it is cancelled: the next turn continues.
VACUUM_SECONDS = 600.0
#: Limits of its statements: a statement that waits longer for a lock is left to the next turn.
LIMITS = Limits(lock=0.2)

#: Where a walk resumes, as a JSON value. None: the walk is over.
Position = Any
Piece = Callable[[Cursor, Settings, Position], Position]


def run(
    cursor: Cursor,
    settings: Settings,
    *,
    ending: Callable[[], bool] = lambda: False,
    allow: Callable[[float], None] = lambda seconds: None,
) -> bool:
    """Take a turn, if one is due; return whether it was.

    Stops after the current piece once `ending()` is true. `allow(seconds)` lets the statements of
    later chores take longer than LIMITS.
    """
    before = chores.take_turn(cursor, every=TURN_SECONDS)
    if before is None:
        return False
    after: dict[str, Position] = {}
    for name, chore in CHORES.items():
        position = before.get(name)
        try:
            if chore.seconds is not None:
                allow(chore.seconds)
            for _ in range(chore.pieces):
                if ending():
                    break
                position = chore.piece(cursor, settings, position)
                if position is None:
                    break
        except LOST as error:
            if cursor.connection.closed:
                raise
            logger.debug("chore %s continues in the next turn: %s", name, error)
        except Exception as error:
            position = None
            log_failure("chore_failed", error, "chore %s failed", name)
        if position is not None:
            after[name] = position
    if after != before:
        chores.resume_at(cursor, after)
    return True


def _prune_dead(cursor: Cursor, settings: Settings, at: Position) -> Position:
    """Remove dead letters of one queue; return where the next piece starts.

    That is the name of the last queue or, if it has more, a list: its name, and a time of death.
    """
    with within_transaction(cursor):
        if isinstance(at, list):
            return _prune_dead_of(cursor, settings, *at) or at[0]
        names = chores.dead_queues(cursor, after=at or "", limit=PIECE_QUEUES)
        for name in names:
            if (position := _prune_dead_of(cursor, settings, name, BEGINNING)) is not None:
                return position
    return names[-1] if len(names) == PIECE_QUEUES else None


def _prune_dead_of(cursor: Cursor, settings: Settings, name: str, after: str) -> Position:
    """Return the position of `_prune_dead()`, None if nothing was removed."""
    if (oldest := settings.queue(name).dead_retention) is None:
        return None
    removed, resume = pruning.prune_dead(
        cursor, queue=name, older_than=oldest, limit=PIECE_ROWS, after=after
    )
    if not removed:
        return None
    message_changes.free_followers(cursor, removed)
    if any(settings.in_line(name, row.key) for row in removed):
        notify.ring_if_room(cursor)
    return name if resume is None else [name, resume]


def _free_stranded(cursor: Cursor, settings: Settings, at: Position) -> Position:
    skipping = [name for name, queue in settings.queues.items() if queue.on_dead_head == "skip"]
    after = keys.BEFORE_ALL if at is None else int(at)
    try:
        with within_transaction(cursor):
            freed = keys.free_stranded(cursor, skipping=skipping, limit=PIECE_ROWS, after=after)
            if freed.rows:
                notify.ring_if_room(cursor)
        return freed.resume
    except LOST:
        raise
    except psycopg.Error as error:
        log_failure(
            "chore_failed", error, "the database refuses to unblock the next message of a key"
        )
    for _ in range(SINGLE_MESSAGE_PIECES):
        if (blocker := keys.next_blocker(cursor, after=after)) is None:
            return None
        try:
            keys.free_stranded(cursor, skipping=skipping, limit=1, after=blocker - 1)
        except LOST:
            raise
        except psycopg.Error as error:
            text = "the messages behind message %s cannot be unblocked: %s"
            logger.debug(text, blocker, error_name(error))
        after = blocker
    return after


def _promote_put_aside(cursor: Cursor, settings: Settings, at: Position) -> Position:
    """Store the messages that were put aside for unique ids that are now free."""
    found = put_aside.free_put_aside(cursor, limit=PIECE_ROWS, after=at and UniqueId(*at))
    for start in range(0, len(found.ids), PIECE_UNIQUE_IDS):
        _promote(cursor, found.ids[start : start + PIECE_UNIQUE_IDS])
    return found.resume and list(found.resume)


def _promote(cursor: Cursor, ids: Sequence[UniqueId]) -> None:
    """Promote messages; one that the database refuses stops no other."""

    def promote_together(some: Sequence[UniqueId]) -> list[int]:
        # Another session may be taking one of them: the next walk finds the rest.
        with suppress(psycopg.errors.LockNotAvailable), within_transaction(cursor):
            return promotion.promote_put_aside(cursor, some)
        return []

    def refused(id: UniqueId, error: Exception) -> None:
        logger.warning(
            "the message put aside for unique id %s of type %s in queue %s cannot be stored: %s",
            id.unique_id,
            id.type,
            id.queue,
            error_name(error),
            extra={"event": "chore_failed", "queue": id.queue},
        )

    skip_refused_rows(promote_together, ids, refused)


def _warn_of_deep(cursor: Cursor, settings: Settings, at: Position) -> Position:
    """Warn about queues deeper than `warn_depth`: once per `warn_every` for the whole fleet."""
    names = chores.waiting_queues(cursor, after=at or "", limit=PIECE_QUEUES)
    depths = {name: settings.queue(name).warn_depth for name in names}
    limits = {name: depth + 1 for name, depth in depths.items() if depth}
    waiting = _count(cursor, limits)
    for name in sorted(name for name, count in waiting.items() if count > depths[name]):
        if not chores.take_warning(cursor, queue=name, every=settings.queue(name).warn_every):
            continue
        maximum = max(MAX_COUNTED, limits[name])
        count = _count(cursor, {name: maximum})[name]
        more = "at least " if count >= maximum else ""
        announce_queue(
            queue_deep,
            name,
            f"has {more}{count:,} waiting messages, more than its warn_depth of {depths[name]:,}",
            depth=count,
            warn_depth=depths[name],
        )
    return names[-1] if len(names) == PIECE_QUEUES else None


def _vacuum(cursor: Cursor, settings: Settings, at: Position) -> Position:
    return vacuum.vacuum_due(cursor, at if isinstance(at, dict) else {}) or None


def _count(cursor: Cursor, limits: dict[str, int]) -> dict[str, int]:
    with within_transaction(cursor):
        return chores.count_with_blocked(cursor, limits) if limits else {}


class Chore(NamedTuple):
    """A function that does one piece and returns where the next one starts; `pieces` per turn.

    `seconds`: how long the statements of this chore, and of later ones, may take.
    """

    piece: Piece
    pieces: int
    seconds: float | None = None


#: In this order. Chores that walk over rows that stay have few pieces, so that they cost little.
CHORES = {
    "expire": Chore(expiring.expire, 200),
    "stranded": Chore(_free_stranded, 20),
    "aside": Chore(_promote_put_aside, 20),
    "attempts": Chore(
        retention.pruner("attempts", lambda settings: settings.attempt_retention), 100
    ),
    "results": Chore(retention.pruner("results", lambda settings: settings.result_retention), 100),
    "kept": Chore(retention.pruner("kept results"), 100),
    "quiet": Chore(retention.pruner("quiet ids"), 100),
    "dead": Chore(_prune_dead, 100),
    "operations": Chore(retention.prune_operations, 1),
    "workers": Chore(retention.prune_workers, 1),
    "history": Chore(retention.prune_history, 100),
    "days": Chore(retention.maintain_days, 10),
    "deep": Chore(_warn_of_deep, 1),
    "figures": Chore(retention.roll_up_figures, 100),
    "vacuum": Chore(_vacuum, 1, seconds=VACUUM_SECONDS),
}
