"""What a claim returns of a message: the columns of a ClaimedRow, in its order."""

from __future__ import annotations

from django_mq.messages import ClaimedRow

#: The attempt that a claim begins: what others wrote may be the most that the CHECK allows.
NEXT_ATTEMPT = "least(m.attempts, 2147483645) + 1"
#: So many columns a ClaimedRow has; what a statement returns besides comes behind them.
WIDTH = len(ClaimedRow._fields)


def claimed_columns(*, payload: str = "m.payload::text", suspect: str = "m.suspect") -> str:
    """Return the columns of a ClaimedRow for a statement that reads or changes messages `m`.

    `payload` and `suspect` are given where the statement has read them before: a long payload is
    not unpacked twice, and `suspect` may be asked for as it was.
    """
    return f"""
       m.id, m.queue, m.type, m.handler, m.schema_version, {payload}, m.metadata::text,
       m.priority, m.key, m.attempts, m.max_attempts, m.retry::text, coalesce(m.claimed_by, ''),
       m.wants_result, {suspect},
       date_part('epoch', statement_timestamp() - m.held_since),
       date_part('epoch', m.created_at), date_part('epoch', statement_timestamp()),
       m.unique_id, m.ordered,
       date_part('epoch', statement_timestamp() - greatest(m.created_at, m.processable_after)),
       m.expires_at is not null"""
