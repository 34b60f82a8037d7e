"""The first messages of a queue, or of all queues together, in the order of their ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.store import Cursor

# By the primary key, the only index in the order of ids. Where the queue has few rows among many,
# it scans past the others: 0.3 s for a million.
PEEK = """
select m.id
  from django_mq_queuedmessage m
 where m.dead_at is null and (%(queue)s::text is null or m.queue = %(queue)s)
 order by m.id
 limit %(limit)s
"""


def peek(cursor: Cursor, *, queue: str | None, limit: int) -> list[int]:
    """Return the lowest `limit` ids of live messages, of one queue or of all."""
    cursor.execute(PEEK, {"queue": queue, "limit": limit})
    return _ids(cursor.fetchall())


PEEK_FREE = """
select m.id
  from django_mq_queuedmessage m
 where m.dead_at is null and (%(queue)s::text is null or m.queue = %(queue)s)
   and (m.leased_until is null or m.leased_until <= statement_timestamp())
 order by m.id
 limit %(limit)s
   for share of m skip locked
"""


def peek_free(cursor: Cursor, *, queue: str | None, limit: int) -> list[int]:
    """Return what `peek` does, without messages that are leased or locked by another session.

    Locks the rows until the transaction ends: roll back to a savepoint.
    """
    cursor.execute(PEEK_FREE, {"queue": queue, "limit": limit})
    return _ids(cursor.fetchall())


def _ids(rows: Iterable[Sequence[int]]) -> list[int]:
    return [row[0] for row in rows]
