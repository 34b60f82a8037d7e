"""Keyed messages, and claims of them, for the tests of lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from django_mq.messages import ClaimedRow, Fence
from django_mq.models import QueuedMessage
from django_mq.store import claim_keyed as with_keys
from django_mq.store import key_lines, keys, settle
from django_mq.store.claim import Claim, Lane, lane_columns
from django_mq.store.keys import KeyLine
from tests.rows import add, stored

Cursor = psycopg.Cursor[Any]

INSERT = """
insert into django_mq_queuedmessage (queue, type, handler, key, payload, processable_after)
values ('mail', 'a', 'h', 'k', '{}', now() - interval '1 h')
returning id
"""


def keyed(key: str | None = "k", **given: Any) -> QueuedMessage:
    """Insert a message of handler h with an order key."""
    return add(**{"handler": "h", "key": key, **given})


def take(
    cursor: Cursor,
    *lanes: Lane,
    limit: int = 100,
    max_bytes: int = 1 << 22,
    skip_dead: bool = False,
    more_claimers: Sequence[str] = (),
    park: bool = True,
) -> Claim:
    """Claim, and commit."""
    with cursor.connection.transaction():
        return take_open(
            cursor,
            *lanes,
            limit=limit,
            max_bytes=max_bytes,
            skip_dead=skip_dead,
            more_claimers=more_claimers,
            park=park,
        )


def take_open(
    cursor: Cursor,
    *lanes: Lane,
    limit: int = 100,
    max_bytes: int = 1 << 22,
    skip_dead: bool = False,
    more_claimers: Sequence[str] = (),
    park: bool = True,
    line_limits: with_keys.LineLimits = with_keys.without_limits,
) -> Claim:
    """Claim in the open transaction."""
    return with_keys.claim(
        cursor,
        lanes=lanes or [Lane("mail", 0)],
        claimer="me:7",
        lease=30.0,
        limit=limit,
        max_bytes=max_bytes,
        skip_dead=skip_dead,
        more_claimers=more_claimers,
        park=park,
        line_limits=line_limits,
    )


def claim_params(**more: Any) -> dict[str, Any]:
    """Return the parameters of a claim's first statement."""
    return {
        **lane_columns([Lane("mail", 0)]),
        "limit": 100,
        "window": 1000,
        "skip_dead": False,
        "admitted": False,
        "park": True,
        **more,
    }


def line_params(*lines: tuple[str, str, str, int], **more: Any) -> dict[str, Any]:
    """Return the parameters of the second statement, for lines that the first one returned."""
    return claim_params(
        **key_lines.columns("line", lines),
        line_limits=[1000] * len(lines),
        claimers=["me:1"],
        per_claimer=100,
        lease=30.0,
        bytes=1 << 20,
        with_marks=True,
        nonatomic="{}",
        **more,
    )


def ids(claimed: Claim) -> list[int]:
    return [row.id for row in claimed.rows]


def fences(claimed: Claim) -> list[Fence]:
    return [Fence(row.id, row.attempts, row.claimed_by) for row in claimed.rows]


def ack(cursor: Cursor, claimed: Claim, *, after: Callable[[], None] = lambda: None) -> None:
    """Settle a whole claim like a worker: the followers in the same transaction."""
    with cursor.connection.transaction():
        settle.ack(cursor, fences(claimed))
        keys.free_next(cursor, [line_of(row) for row in claimed.rows if row.key is not None])
        after()


def line_of(row: ClaimedRow) -> KeyLine:
    assert row.key is not None
    return KeyLine(row.queue, row.handler, row.key, row.id)


def blocked_by(*messages: QueuedMessage) -> list[int | None]:
    return [stored(message).blocked_by for message in messages]


def states(*messages: QueuedMessage) -> list[str]:
    found = {m.pk: m.state for m in QueuedMessage.objects.with_state()}
    return [str(found[message.pk]) for message in messages]
