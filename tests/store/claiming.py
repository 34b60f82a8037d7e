"""Claims from one queue or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from django_mq.store.claim import Claim, Lane, claim

Cursor = psycopg.Cursor[Any]


def take(
    cursor: Cursor,
    *lanes: Lane,
    limit: int = 100,
    max_bytes: int = 1 << 22,
    more_claimers: Sequence[str] = (),
) -> Claim:
    return claim(
        cursor,
        lanes=lanes or [Lane("mail", 0)],
        claimer="me:7",
        lease=30.0,
        limit=limit,
        max_bytes=max_bytes,
        more_claimers=more_claimers,
    )


def ids(claimed: Claim) -> list[int]:
    return [row.id for row in claimed.rows]
