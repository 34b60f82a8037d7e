"""Claim from queues with order keys: take the first messages of each key, park those behind.

The line of a key is (queue, handler, key); its head is the row with the lowest id. A claim takes a
row only together with every earlier row of its line, and only while no row of the line is claimed,
so at most one worker has a line. `key_lines.lock()` locks the lines first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from django_mq.messages import ClaimedRow
from django_mq.policy.line_limits import UNLIMITED
from django_mq.store import array, key_lines, names
from django_mq.store.claim import Claim, Lane, excluding, lane_columns
from django_mq.store.claim_lines import CLAIM_LINES, CLAIM_UNLOCKED_LINES
from django_mq.store.claimed_row import COLUMN_COUNT

if TYPE_CHECKING:
    from django_mq.store import Cursor

#: The number of waiting rows that one claim examines, unless it may take more. With `park`, a claim
#: that fills its window parks the rows that it cannot take: no claim scans a long line twice.
WINDOW = 250
#: Returns the most messages to take of each of some lines, given their handlers.
LineLimits = Callable[[Sequence[str]], Sequence[int]]


def without_limits(handlers: Sequence[str]) -> Sequence[int]:
    """Return limits that no claim reaches."""
    return [UNLIMITED] * len(handlers)


def claim(
    cursor: Cursor,
    *,
    lanes: Sequence[Lane],
    claimer: str,
    lease: float,
    limit: int,
    max_bytes: int,
    skip_dead: bool,
    admitted: bool = False,
    more_claimers: Sequence[str] = (),
    excluded: Sequence[int] = (),
    nonatomic: Sequence[str] = (),
    with_marks: bool = True,
    park: bool = True,
    line_limits: LineLimits = without_limits,
) -> Claim:
    """Take up to `limit` due messages of `lanes`, with and without keys; see `claim.claim()`.

    From each key it takes the first messages, without a gap. A head that is dead (unless
    `skip_dead`), delayed, retrying or claimed blocks those behind it; they are parked, with
    `blocked_by` set to the head. The caller opens a transaction and commits it at once. The marks
    pass only messages that were taken, parked or locked, so those freed later lie before them.
    `with_marks` returns the marks, for a seventh of the server's time. The `more_claimers` share
    the rows. Rows in `excluded`, and the rows behind them in their keys, are left out. Without
    `park`, nothing is parked, and `Claim.stuck` may be true. If it takes nothing because of
    `line_limits`, it does not look for further lines.
    """
    locked: list[tuple[Any, ...]] = []
    given: dict[str, object] = {
        **lane_columns(lanes),
        "limit": limit,
        "window": (window := max(WINDOW, limit)),
        "skip_dead": skip_dead,
        "admitted": admitted,
        "claimers": array((claimer, *more_claimers)),
        "per_claimer": -(-limit // (1 + len(more_claimers))),
        "lease": lease,
        "bytes": max_bytes,
        "with_marks": with_marks,
        "park": park,
        "excluded": array(excluded),
        "nonatomic": names(nonatomic),
    }
    # If none of these lines gave a row to take or park, others of the window may. If none of those
    # did, nor rows without a key, although no session is claiming them: look behind locked rows.
    for lines, unlocked in (limit, False), (window, False), (window, True):
        given |= key_lines.columns("tried", locked)
        locked = key_lines.lock(cursor, given, limit=lines, excluded=excluded, unlocked=unlocked)
        limits = line_limits([handler for _, handler, *_ in locked])
        given |= key_lines.columns("line", locked) | {"line_limits": array(limits)}
        statement = CLAIM_UNLOCKED_LINES if unlocked else CLAIM_LINES
        cursor.execute(excluding(statement, excluded), given)
        rows = cursor.fetchall()
        keyless, stuck, unfinished, passed = rows[0][-4:]
        left_lines = 0 in limits
        if rows[0][0] is not None or unfinished or left_lines:
            break
        if len(locked) < lines and not (stuck and park and (locked or keyless)):
            break
    found = sorted((row for row in rows if row[0] is not None), key=itemgetter(-5))
    ends = {
        (queue, priority): (float(at), id) for queue, priority, at, id in json.loads(passed or "[]")
    }
    claimed = [ClaimedRow._make(row[:COLUMN_COUNT]) for row in found]
    return Claim(
        claimed, ends, unfinished=unfinished, stuck=stuck and not left_lines, left_lines=left_lines
    )
