"""Route a message to its handlers: one copy per handler, the row itself being the first."""

from __future__ import annotations

from collections.abc import Sequence

from django_mq.messages import Fence
from django_mq.store import Cursor

SPLIT = """
with original as (
    update django_mq_queuedmessage m
       set handler = %(handler)s, max_attempts = %(maximum)s, held_since = null
     where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
       and m.handler = ''
    returning m.*
), copies as (
    insert into django_mq_queuedmessage
           (queue, type, schema_version, payload, metadata, handler, priority, key, retry,
            max_attempts, expires_at, processable_after, created_at, ordered)
    select o.queue, o.type, o.schema_version, o.payload, o.metadata, copy.handler, o.priority,
           o.key, o.retry, copy.max_attempts, o.expires_at, o.processable_after, o.created_at,
           o.ordered
      from original o
     cross join unnest(%(handlers)s::text[], %(maximums)s::int[]) as copy (handler, max_attempts)
)
select id from original
"""


def split(
    cursor: Cursor, fence: Fence, *, handlers: Sequence[str], max_attempts: Sequence[int]
) -> bool:
    """Give the message to the first of `handlers`, and a copy of it to each of the others.

    Changes nothing and returns False if the message is no longer ours.
    """
    cursor.execute(
        SPLIT,
        {
            "id": fence.id,
            "attempt": fence.attempt,
            "claimer": fence.claimed_by,
            "handler": handlers[0],
            "maximum": max_attempts[0],
            "handlers": list(handlers[1:]),
            "maximums": list(max_attempts[1:]),
        },
    )
    return cursor.fetchone() is not None
