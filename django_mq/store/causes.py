"""The messages of one chain: a first message, and all that handlers broadcast because of it.

Stored messages have no index by chain: such an index would slow down every broadcast and every
claim. A message has a higher id than its cause, so the search starts at the id of the chain's first
message and scans a bounded number of messages.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.readers import prepare_to_read


def chain_in(metadata: str) -> str:
    """Return the SQL for the chain in `metadata`: null if no handler broadcast the message."""
    return f"left({metadata} ->> 'mq.correlation_id', 128)"


def cause_in(metadata: str) -> str:
    """Return the SQL for the cause in `metadata`: null if that is not the id of a message.

    Other programs may have written any value there.
    """
    cause = f"{metadata} ->> 'mq.causation_id'"
    return f"case when {cause} ~ '^[1-9][0-9]{{0,17}}$' then ({cause})::bigint end"


CHAIN_OF = f"""
select {chain_in("m.metadata")}
  from django_mq_queuedmessage m
 where m.id = %(id)s
union all
select h.correlation_id from django_mq_handledmessage h where h.id = %(id)s
 limit 1
"""


def chain_of(cursor: Cursor, id: int) -> str | None:
    """Return the chain that a message names; None if it is gone, or if no handler broadcast it."""
    cursor.execute(CHAIN_OF, {"id": id})
    row = cursor.fetchone()
    return None if row is None else row[0]


class ChainRow(NamedTuple):
    """A message of a chain; `ended_at` if it was handled, else None."""

    id: int
    cause: int | None
    type: str
    handler: str
    queue: str
    ended_at: datetime | None


STORED = f"""
with walked as materialized (
    select m.id, m.type, m.handler, m.queue, m.metadata
      from django_mq_queuedmessage m
     where m.id >= %(first)s
     order by m.id
     limit %(window)s
)
select w.id,
       {cause_in("w.metadata")},
       w.type, w.handler, w.queue, null::timestamptz, (select count(*) from walked)
  from walked w
 where w.metadata ->> 'mq.correlation_id' = %(chain)s or w.id in (%(id)s, %(first)s)
 order by w.id
 limit %(limit)s
"""


def stored(
    cursor: Cursor, *, chain: str, id: int, first: int, window: int, limit: int
) -> tuple[list[ChainRow], bool]:
    """Return the messages of `chain`, `id` and `first`, among the `window` stored from `first` on.

    Also returns whether the window reached the end of the table.
    """
    prepare_to_read(cursor)
    params = {"chain": chain, "id": id, "first": first, "window": window, "limit": limit}
    cursor.execute(STORED, params)
    found = cursor.fetchall()
    return [ChainRow._make(row[:-1]) for row in found], not found or found[0][-1] < window


HANDLED = """
select h.id, h.causation_id, h.type, h.handler, h.queue, h.ended_at
  from django_mq_handledmessage h
 where h.correlation_id = %(chain)s
union all
select h.id, h.causation_id, h.type, h.handler, h.queue, h.ended_at
  from django_mq_handledmessage h
 where h.id = any(%(ids)s::bigint[]) and h.correlation_id is distinct from %(chain)s
 order by 1
 limit %(limit)s
"""


def handled(cursor: Cursor, *, chain: str, ids: list[int], limit: int) -> list[ChainRow]:
    """Return the messages of `chain` in the history, and those with `ids`."""
    cursor.execute(HANDLED, {"chain": chain, "ids": ids, "limit": limit})
    return [ChainRow._make(row) for row in cursor.fetchall()]
