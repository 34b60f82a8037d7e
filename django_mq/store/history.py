"""History: the ack that keeps what it removes, in the same statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.messages import PlainFence
from django_mq.store import MATCHES_FENCE, Cursor, array, literals
from django_mq.store.causes import cause_in, chain_in
from django_mq.store.limits import Limits, set_local
from django_mq.store.row_locks import LOCK_WAIT_SECONDS


class HandledDelivery(NamedTuple):
    """A message whose handler succeeded after `seconds`; its history is kept `retention` seconds.

    `size`: the bytes of its payload. `with_content`: payload and metadata are kept, too.
    """

    fence: PlainFence
    seconds: float
    retention: float
    size: int
    with_content: bool


# Like `settle.ACK`, which removes messages that have no history. The n-th fence has the n-th value
# of each array. Finding n by a join would compare each row with each fence (see `MATCHES_FENCE`),
# which takes longer than `array_position()`.
ACK = f"""
with removed as (
    delete from django_mq_queuedmessage m
     where {MATCHES_FENCE}
    returning m.id, m.queue, m.type, m.schema_version, m.handler, m.key, m.priority, m.attempts,
              m.claimed_by, m.created_at, m.processable_after, m.metadata, m.payload,
              array_position(%(ids)s::bigint[], m.id) as n
)
insert into django_mq_handledmessage
       (id, queue, type, schema_version, handler, key, priority, attempts, worker, size,
        correlation_id, causation_id, created_at, due_at, started_at, ended_at, keep_until,
        payload, metadata)
select id, queue, type, schema_version, handler, key, priority, attempts,
       split_part(claimed_by, ':', 1), (%(sizes)s::int[])[n],
       {chain_in("metadata")},
       {cause_in("metadata")},
       created_at, processable_after,
       statement_timestamp() - make_interval(secs => (%(seconds)s::float8[])[n]),
       statement_timestamp(),
       statement_timestamp() + make_interval(secs => (%(retentions)s::float8[])[n]),
       case when (%(with_contents)s::bool[])[n] then payload end,
       case when (%(with_contents)s::bool[])[n] then metadata end
  from removed
returning id
"""


def ack(cursor: Cursor, handled: Sequence[HandledDelivery]) -> set[int]:
    """Move messages, whose handlers are done, to the history; return their ids."""
    cursor.execute(ACK, _columns(handled))
    return {row[0] for row in cursor.fetchall()}


def ack_alone(handled: Sequence[HandledDelivery]) -> str:
    """Return the query of `ack()`, in a transaction of its own; see `settle.ack_alone()`."""
    return f"{set_local(Limits(lock=LOCK_WAIT_SECONDS))}; {ACK % literals(_columns(handled))}"


def _columns(handled: Sequence[HandledDelivery]) -> dict[str, object]:
    fences, seconds, retentions, sizes, with_contents = zip(*handled, strict=True)
    ids, attempts, claimers = zip(*fences, strict=True)
    return {
        "ids": array(ids),
        "attempts": array(attempts),
        "claimers": array(claimers),
        "seconds": array(seconds),
        "retentions": array(retentions),
        "sizes": array(sizes),
        "with_contents": array(with_contents),
    }
