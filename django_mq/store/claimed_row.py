"""The columns that a claim returns: the fields of ClaimedRow, in order."""

from __future__ import annotations

from django_mq.messages import ClaimedRow
from django_mq.store.kept_results import OPTIONS

#: The attempt that a claim begins. Other clients may have written the maximum that CHECK allows.
NEXT_ATTEMPT = "least(m.attempts, 2147483645) + 1"
#: The attempts, minus the one that did not start. Other clients may have written zero.
REFUNDED = "greatest(m.attempts - 1, 0)"
#: The number of columns of a ClaimedRow; statements return any further columns after these.
COLUMN_COUNT = len(ClaimedRow._fields)


def unstarted_claim(claimer: str) -> str:
    """Return the value that a claim of messages `m` sets the column to: `claimer`, or null.

    It is the claimer if the handler cannot run before `leases.start()` clears the column: if the
    parameter `nonatomic` names the handler, and the message is not that of a task which is atomic
    for it alone. Each claim has another claimer, also in versions that do not know the column, so
    an attempt has not started if the column equals `claimed_by`.
    """
    return f"""case when m.handler = any(%(nonatomic)s::text[])
                     and m.metadata #> '{{{OPTIONS},atomic}}' is distinct from 'true'
                    then {claimer} end"""


def claimed_columns(*, payload: str = "m.payload::text", suspect: str = "m.suspect") -> str:
    """Return the columns of a ClaimedRow for a statement that reads or changes messages `m`.

    Pass `payload` and `suspect` where the statement has read them before: a long payload is then
    not decompressed twice, and `suspect` has the value before an update.
    """
    return f"""
       m.id, m.queue, m.type, m.handler, m.schema_version, {payload}, m.metadata::text,
       m.priority, m.key, m.attempts, m.max_attempts, m.retry::text, coalesce(m.claimed_by, ''),
       m.wants_result, {suspect},
       date_part('epoch', statement_timestamp() - m.held_since),
       date_part('epoch', m.created_at), date_part('epoch', statement_timestamp()),
       m.unique_id, m.ordered,
       date_part('epoch', statement_timestamp() - greatest(m.created_at, m.processable_after)),
       date_part('epoch', m.expires_at - statement_timestamp())"""
