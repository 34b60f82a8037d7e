"""Claims from ordered queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from django_mq.models import QueuedMessage
from django_mq.policy.line_marks import FRONT, LineMarks
from django_mq.store import ordered_queues
from django_mq.store.ordered_queues import ClaimedLine, OwnedQueue
from tests.rows import add

Cursor = psycopg.Cursor[Any]


def own(cursor: Cursor, worker: str = "me", lease: float = 6.0) -> OwnedQueue | None:
    return ordered_queues.own(cursor, queue="line", worker=worker, lease=lease)


def row(**given: Any) -> QueuedMessage:
    return add("line", **{"ordered": True, **given})


def claim(
    cursor: Cursor,
    *,
    worker: str = "me",
    limit: int = 100,
    max_bytes: int = 1 << 20,
    skip_dead: bool = False,
    admitted: bool = False,
    more_claimers: Sequence[str] = (),
    marks: LineMarks = FRONT,
    from_front: bool = True,
) -> ClaimedLine:
    """Claim, and commit."""
    with cursor.connection.transaction():
        return ordered_queues.claim(
            cursor,
            queue="line",
            worker=worker,
            claimer=f"{worker}:7",
            lease=6.0,
            limit=limit,
            max_bytes=max_bytes,
            skip_dead=skip_dead,
            admitted=admitted,
            more_claimers=more_claimers,
            marks=marks,
            from_front=from_front,
        )


def take(cursor: Cursor, **given: Any) -> list[int]:
    """Claim from the front, and commit; return the ids."""
    return [each.id for each in claim(cursor, **given).rows]
