"""What the end of a message does to its unique id: free, quiet, or of what was put aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import psycopg

from django_mq.outcomes import DeadLettered
from django_mq.store import freeing, operate
from django_mq.store.freeing import Done
from django_mq.store.unique import UniqueId
from django_mq.worker import ending  # each imports the other, so neither's names

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow
    from django_mq.store import Cursor
    from django_mq.worker.ending import Ended

#: Ids that one turn of the chores brings forward, and how long it waits for them, in ms.
PIECE, LONGEST_WAIT = 100, 200


def follow(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Free the ids of what is done, in its transaction; a retry keeps its id."""
    done = [
        _done(each.delivery._row, success=each.settled is ending.Settled.ACKED)
        for each in ended
        if each.delivery._row.unique_id is not None and _is_done(each)
    ]
    if done:
        freeing.end(cursor, done)


def finished(cursor: Cursor, row: ClaimedRow) -> None:
    """Free the id of a message that its handler finished, in that transaction."""
    if row.unique_id is not None:
        freeing.end(cursor, [_done(row, success=True)])


def mend(cursor: Cursor) -> None:
    """Bring forward what was put aside for an id that nobody has: a chore."""
    left = freeing.left_aside(cursor, limit=PIECE)
    if not left:
        return
    try:
        with ending.within_transaction(cursor):
            operate.limit_waits(cursor, most=LONGEST_WAIT)
            freeing.come_forward(cursor, left)
    except psycopg.errors.LockNotAvailable:
        return  # somebody takes one of them just now: the next turn finds the others


def _is_done(ended: Ended) -> bool:
    settled = ended.settled
    if settled is ending.Settled.FAILED:
        return isinstance(ended.outcome, DeadLettered)
    return settled in (ending.Settled.ACKED, ending.Settled.BURIED)


def _done(row: ClaimedRow, *, success: bool) -> Done:
    id = UniqueId(row.queue, row.handler, row.type, row.unique_id or "")
    return Done(row.id, id, success)
