"""Store a dead letter for a message that came in and cannot be broadcast."""

from __future__ import annotations

import json
from typing import Any

from django_mq.store import Cursor

INSERT_DEAD = """
insert into django_mq_queuedmessage (
    queue, type, payload, metadata, dead_at, dead_reason, last_error
) values (
    %s, %s, %s::jsonb, %s::jsonb, statement_timestamp(), %s, %s
)
"""


def insert_dead(
    cursor: Cursor,
    *,
    queue: str,
    type: str,
    payload: Any,
    metadata: dict[str, Any],
    reason: str,
    error: str,
) -> None:
    """Insert a message that is dead from the start, in the caller's transaction.

    `reason` is shown to all who see the list; `error`, which may quote the payload, is not.
    """
    texts = json.dumps(payload), json.dumps(metadata)
    cursor.execute(INSERT_DEAD, (queue, type, *texts, reason, error))
