"""Operations: add them, take one for a step, write its progress, end it.

A step locks its row, and commits its changes together with the progress: if a worker dies during a
step, the step is rolled back and another worker repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.store import Cursor

_OPEN = "o.state in ('waiting', 'running')"

# During a deploy, an operation may have an action that only newer workers know.
_KNOWN = f"{_OPEN} and o.action = any(%(actions)s::text[])"

# An operation that a worker has locked is in progress.
ANY_OPEN = f"""
select o.id
  from django_mq_operation o
 where {_KNOWN}
 limit 1
   for update skip locked
"""


def any_open(cursor: Cursor, actions: Collection[str]) -> bool:
    """Return whether there is an open operation, of these actions, that no worker has locked."""
    cursor.execute(ANY_OPEN, {"actions": list(actions)})
    return cursor.fetchone() is not None


class OperationRow(NamedTuple):
    """An operation as a step needs it; `filter` is JSON."""

    id: int
    action: str
    filter: str
    last_id: int
    after_id: int
    user_id: str


TAKE = f"""
select o.id, o.action, o.filter::text, o.last_id, o.after_id, o.user_id
  from django_mq_operation o
 where {_KNOWN} and (cast(%(id)s as bigint) is null or o.id = %(id)s)
 order by o.id
 limit 1
   for update skip locked
"""


def take(cursor: Cursor, actions: Collection[str], *, id: int | None = None) -> OperationRow | None:
    """Lock the oldest open operation of these actions that no other session has locked.

    `id`: lock the operation with this id, or none.
    """
    cursor.execute(TAKE, {"actions": list(actions), "id": id})
    row = cursor.fetchone()
    return None if row is None else OperationRow._make(row)


DEAD_BEFORE = """
select m.id
  from django_mq_queuedmessage m
 where m.id = any(%(ids)s::bigint[])
   and m.dead_at < (select o.created_at from django_mq_operation o where o.id = %(id)s)
"""


def dead_before(cursor: Cursor, id: int, ids: Sequence[int]) -> list[int]:
    """Return which of `ids` were dead when the operation `id` was requested."""
    cursor.execute(DEAD_BEFORE, {"id": id, "ids": list(ids)})
    return [row[0] for row in cursor.fetchall()]


class Progress(NamedTuple):
    """The progress of an operation; `state` is the new one, running unless this ends it."""

    action: str
    state: str
    done: int
    skipped: int


# The counts stop at the largest bigint: another program may have written any. After the smallest,
# written into the statement, `::bigint` would bind more tightly than the sign.
ADVANCE = f"""
update django_mq_operation
   set after_id = cast(%(after)s as bigint),
       done = least(done, {MAX_BIGINT} - %(done)s) + %(done)s,
       skipped = least(skipped, {MAX_BIGINT} - %(skipped)s) + %(skipped)s,
       state = %(state)s::text, error = %(error)s,
       started_at = coalesce(started_at, statement_timestamp()),
       ended_at = case when %(state)s::text <> 'running' then statement_timestamp() end
 where id = %(id)s
returning action, state, done, skipped
"""


def advance(
    cursor: Cursor,
    id: int,
    *,
    after: int,
    done: int = 0,
    skipped: int = 0,
    state: str = "running",
    error: str = "",
) -> Progress:
    """Write the progress of a step of a locked operation; end it unless `state` is running."""
    cursor.execute(
        ADVANCE,
        {
            "id": id,
            "after": after,
            "done": done,
            "skipped": skipped,
            "state": state,
            "error": error,
        },
    )
    return Progress._make(cursor.fetchone())


CANCEL = f"""
update django_mq_operation o
   set state = 'cancelled', ended_at = statement_timestamp()
 where o.id = %(id)s and {_OPEN}
returning o.action, o.state, o.done, o.skipped
"""


def cancel(cursor: Cursor, id: int) -> Progress | None:
    """End an open operation, after waiting for its current step; return None if it is over."""
    cursor.execute(CANCEL, {"id": id})
    row = cursor.fetchone()
    return None if row is None else Progress._make(row)


PRUNE = """
with walked as materialized (
    select o.id, o.ended_at
      from django_mq_operation o
     where o.id > %(after)s
     order by o.id
     limit %(limit)s
), removed as (
    delete from django_mq_operation
     where id = any(array(
        select walked.id
          from walked
         where walked.ended_at < statement_timestamp() - make_interval(secs => %(older_than)s)))
)
select max(id) from walked having count(*) >= %(limit)s
"""


def prune(cursor: Cursor, *, older_than: float, after: int = 0, limit: int = 1000) -> int | None:
    """Delete operations that ended `older_than` seconds ago, among the next `limit` after `after`.

    Returns the last id it looked at, None if there are no more. An ended operation no longer
    changes, so its row need not be locked first.
    """
    cursor.execute(PRUNE, {"older_than": older_than, "after": after, "limit": limit})
    row = cursor.fetchone()
    return None if row is None else int(row[0])
