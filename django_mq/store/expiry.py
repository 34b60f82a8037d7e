"""Dead-letter messages that expired while they waited: a chore that scans in small pieces."""

from __future__ import annotations

from django_mq.messages import ClaimedRow
from django_mq.store import Cursor
from django_mq.store.claimed_row import claimed_columns
from django_mq.store.conditions import BEGINNING

# The index contains leased rows, too.
_EXPIRY = """
    select m.id, m.expires_at, m.leased_until
      from django_mq_queuedmessage m
     where m.expires_at >= %(after)s::timestamptz and m.expires_at <= statement_timestamp()
       and m.dead_at is null
     order by m.expires_at
     limit %(window)s
"""

_WAITING = f"select walked.id from ({_EXPIRY}) walked where walked.leased_until is null"


def _expire(ids: str) -> str:
    """Return the statement that dead-letters those of `ids`, a query, which have expired."""
    # MATERIALIZED: because of SKIP LOCKED, a plan that scans the CTE again would find other rows.
    return f"""
with expired as materialized (
    select m.id
      from ({ids}) walked
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.id = walked.id and m.dead_at is null and m.leased_until is null
           and m.expires_at <= statement_timestamp()
           for no key update skip locked
     ) m
     limit %(limit)s
)
update django_mq_queuedmessage m
   set dead_at = statement_timestamp(), dead_reason = 'expired', blocked_by = null
 where m.id = any(array(select id from expired))
returning {claimed_columns()}
"""


EXPIRE = _expire(_WAITING)
EXPIRE_ONE = _expire("select %(id)s::bigint id")


def expire(
    cursor: Cursor, *, limit: int, after: str = BEGINNING, window: int = 1000
) -> list[ClaimedRow]:
    """Dead-letter up to `limit` expired waiting messages among the first `window`; return them.

    Messages that are in flight or locked are skipped. The scan begins at `after`, a time that
    `expiry_walked()` returned.
    """
    cursor.execute(EXPIRE, {"limit": limit, "after": after, "window": window})
    return [ClaimedRow._make(row) for row in cursor.fetchall()]


def expire_one(cursor: Cursor, id: int) -> list[ClaimedRow]:
    """Dead-letter message `id` if it has expired, like `expire()`."""
    cursor.execute(EXPIRE_ONE, {"id": id, "limit": 1})
    return [ClaimedRow._make(row) for row in cursor.fetchall()]


def expired(cursor: Cursor, *, after: str, window: int) -> list[int]:
    """Return the ids of the messages that `expire()` examines."""
    cursor.execute(_WAITING, {"after": after, "window": window})
    return [id for (id,) in cursor.fetchall()]


# If a whole window expired at one moment, the next window begins after that moment; the scan finds
# the rest in its next round.
EXPIRY_WALKED = f"""
select case when max(walked.expires_at) > %(after)s::timestamptz then max(walked.expires_at)
            else max(walked.expires_at) + interval '1 microsecond' end::text
  from ({_EXPIRY}) walked
having count(*) >= %(window)s
"""


def expiry_walked(cursor: Cursor, *, after: str, window: int) -> str | None:
    """Return where a scan that began at `after` resumes, None if it reached the end."""
    cursor.execute(EXPIRY_WALKED, {"after": after, "window": window})
    row = cursor.fetchone()
    return None if row is None else str(row[0])


NEXT_EXPIRED = f"""
select walked.expires_at::text
  from ({_EXPIRY}) walked
 where walked.leased_until is null
 order by walked.expires_at
 limit 1
"""


def next_expired(cursor: Cursor, *, after: str, window: int) -> str | None:
    """Return the time of the first message to expire of those that `expire()` examines, or None.

    A scan that resumes there does not walk again over what has been dead-lettered: as long as a
    session holds a snapshot, the index keeps its entries. A message in flight with an earlier time
    must not keep it there, so those are passed over.
    """
    cursor.execute(NEXT_EXPIRED, {"after": after, "window": window})
    row = cursor.fetchone()
    return None if row is None else str(row[0])
