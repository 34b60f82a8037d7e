"""The backlog of a queue, and the locks that give order keys the order of commits."""

from __future__ import annotations

from collections.abc import Iterable

from django_mq.store import Cursor
from django_mq.store.advisory_locks import COMMIT_ORDER

# Scans mq_claim up to the limit.
COUNT_UNBLOCKED = """
select count(*)
  from (select
          from django_mq_queuedmessage
         where queue = %(queue)s
           and leased_until is null and blocked_by is null and dead_at is null
         limit %(limit)s) waiting
"""


def count_unblocked(cursor: Cursor, *, queue: str, limit: int) -> int:
    """Return how many messages wait in `queue`, due or not; at most `limit`.

    Blocked messages are left out, unlike in `chores.count_with_blocked()`.
    """
    cursor.execute(COUNT_UNBLOCKED, {"queue": queue, "limit": limit})
    return cursor.fetchone()[0]  # type: ignore[no-any-return]


# Locks are taken in the order of their numbers, so that no two calls deadlock.
JOIN_LINES = f"""
select pg_advisory_xact_lock(line.number)
  from (select distinct hashtextextended(name, {COMMIT_ORDER}) as number
          from unnest(%(names)s::text[]) as name
         order by number) line
"""


def join_lines(cursor: Cursor, names: Iterable[str]) -> None:
    """Lock these lines in commit order until the transaction ends; other sessions wait."""
    cursor.execute(JOIN_LINES, {"names": list(names)})
