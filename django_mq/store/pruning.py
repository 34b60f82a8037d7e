"""Delete rows that are older than their retention, in small pieces.

A piece begins where the last one ended, not with the oldest row: as long as a session holds a
snapshot, a scan from the oldest row walks over all rows that were deleted. Rows that are locked
meanwhile are left to the next walk.
"""

from __future__ import annotations

from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.conditions import BEGINNING
from django_mq.store.message_changes import Removed

_OLD = "< statement_timestamp() - make_interval(secs => %(older_than)s)"


def _prune(
    table: str,
    condition: str,
    *,
    by: str,
    id: str = "id",
    lock: str = "for update skip locked",
    columns: str = "",
) -> str:
    """Return the statement that deletes the rows with `condition` that are first by time `by`.

    It begins at `after`. Its last column is the time of the last of them; before that, it returns
    `columns` of each row, or the number of rows.
    """
    returned = f"{columns}, max({by}) over ()" if columns else f"count(*), max({by})"
    return f"""
with removed as (
    delete from {table}
     where {id} = any(array(
        select {id} from {table}
         where {condition} and {by} >= %(after)s::timestamptz
         order by {by}
         limit %(limit)s
           {lock}))
    returning {columns or id}, {by}
)
select {returned}::text from removed
"""


# Workers have no right to update failed attempts, so they cannot lock them.
PRUNE = {
    "attempts": _prune("django_mq_failedattempt", f"ended_at {_OLD}", by="ended_at", lock=""),
    "results": _prune(
        "django_mq_result",
        f"created_at {_OLD} and keep_until is null",
        by="created_at",
        id="message_id",
    ),
    "kept results": _prune(
        "django_mq_result", "keep_until < statement_timestamp()", by="keep_until", id="message_id"
    ),
    # A message that was broadcast in the quiet time, and waits, keeps its id.
    "quiet ids": """
with over as materialized (
    select id, message_id, quiet_until
      from django_mq_uniquekey
     where quiet_until <= statement_timestamp() and quiet_until >= %(after)s::timestamptz
     order by quiet_until
     limit %(limit)s
       for update skip locked
), kept as (
    update django_mq_uniquekey
       set quiet_until = null
     where id = any(array(select id from over where message_id is not null))
), freed as (
    delete from django_mq_uniquekey
     where id = any(array(select id from over where message_id is null))
)
select count(*), max(quiet_until)::text from over
""",
}


def prune(
    cursor: Cursor, what: str, *, limit: int, older_than: float = 0.0, after: str = BEGINNING
) -> str | None:
    """Delete up to `limit` failed attempts or results that are `older_than` seconds old.

    Begins at time `after`, and returns where to resume, None if those were all. Kept results and
    quiet times of unique ids are deleted only after their own time is over. A quiet id whose time
    is over already counts as free.
    """
    cursor.execute(PRUNE[what], {"limit": limit, "older_than": older_than, "after": after})
    rows, last = cursor.fetchone()
    return last if rows >= limit else None


class PrunedDead(NamedTuple):
    """Dead letters that were removed, and where to resume in their queue; None: those were all."""

    messages: list[Removed]
    resume: str | None


PRUNE_DEAD = _prune(
    "django_mq_queuedmessage",
    f"queue = %(queue)s and dead_at {_OLD}",
    by="dead_at",
    columns="id, queue, handler, key, type, unique_id",
)


def prune_dead(
    cursor: Cursor, *, queue: str, older_than: float, limit: int, after: str = BEGINNING
) -> PrunedDead:
    """Delete dead letters of `queue` that died more than `older_than` seconds ago, from `after`."""
    asked = {"queue": queue, "older_than": older_than, "limit": limit, "after": after}
    cursor.execute(PRUNE_DEAD, asked)
    rows = cursor.fetchall()
    resume = rows[-1][-1] if len(rows) >= limit else None
    return PrunedDead([Removed(*row[:-1]) for row in rows], resume)
