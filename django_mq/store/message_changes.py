"""Operators' changes to messages, which touch no lease and wait for no row's lock.

A message in flight has a lease, lapsed or not: its worker, or the one that takes it over, settles
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.kept_results import IS_KEPT, keep_removed
from django_mq.store.keys import KeyLine, free_next
from django_mq.store.results import UNANSWERED

#: The columns of `Removed`. Messages in `unanswered` get a new reply; tasks in `kept` have one.
REMOVED_COLUMNS = """id, queue, handler, key, type, unique_id,
       wants_result and dead_at is null and id <> all(%(kept)s::bigint[])
           and id not in (select message_id from unanswered)"""

# A dead letter already has its reply, which is not replaced. A requeued message has the reply of
# its first life, which `replace_replies` replaces.
REPLY_TO_REMOVED = f"""returning id, queue, handler, key, type, unique_id, wants_result, dead_at
), unanswered as (
    insert into django_mq_result (message_id, handler, error_class, error_text)
    select id, handler, '{UNANSWERED}', %(reason)s from removed where wants_result
        on conflict (message_id) do nothing
    returning message_id
)"""

REMOVE = f"""
with removed as (
    delete from django_mq_queuedmessage
     where id = any(array(
        select m.id
          from django_mq_queuedmessage m
         where m.id = any(%(ids)s::bigint[]) and m.leased_until is null
           and case when m.dead_at is null then %(waiting)s else %(dead)s end
           and {IS_KEPT}
           for update skip locked))
    {REPLY_TO_REMOVED}
select {REMOVED_COLUMNS} from removed
"""


class Removed(NamedTuple):
    """A removed message, the line of its key, and its unique id.

    `has_old_reply`: it was requeued, and its reply is that of its first life.
    """

    id: int
    queue: str
    handler: str
    key: str | None
    type: str
    unique_id: str | None
    has_old_reply: bool = False


# A separate statement, run only in the rare case that needs it: it needs more rights than an
# insert.
REPLACE_REPLIES = f"""
update django_mq_result
   set value = null, error_class = '{UNANSWERED}', error_text = %(reason)s,
       created_at = statement_timestamp()
 where message_id = any(%(ids)s::bigint[])
"""


def replace_replies(cursor: Cursor, removed: Sequence[Removed], reason: str) -> None:
    """Make `reason` the reply to the removed requests that had died and were requeued."""
    if ids := [row.id for row in removed if row.has_old_reply]:
        cursor.execute(REPLACE_REPLIES, {"ids": ids, "reason": reason})


def remove(
    cursor: Cursor, *, ids: Sequence[int], waiting: bool, dead: bool, reason: str
) -> list[Removed]:
    """Delete messages in `ids` that wait (if `waiting`) or are dead (if `dead`); return them.

    `reason` becomes the reply to every removed request.
    """
    how: dict[str, Any] = {"waiting": waiting, "dead": dead, "reason": reason}
    kept = keep_removed(cursor, {"ids": list(ids)}, **how)
    cursor.execute(REMOVE, {"ids": list(ids), "kept": kept, **how})
    removed = [Removed(*row) for row in cursor.fetchall()]
    replace_replies(cursor, removed, reason)
    return removed


def free_followers(cursor: Cursor, removed: Sequence[Removed]) -> None:
    """Free the message that is now first of its key, for each key of `removed`."""
    free_next(cursor, [KeyLine(row.queue, row.handler, row.key) for row in removed if row.key])


# Attempts are never lowered: if a number were used twice, the fence of an old attempt would match
# the new one. A past expiry, or the old `held_since`, would kill the message again.
REQUEUE = """
update django_mq_queuedmessage
   set dead_at = null, dead_reason = '', held_since = null, blocked_by = null,
       processable_after = statement_timestamp(),
       max_attempts = least(
           greatest(max_attempts, attempts::bigint + %(attempts)s), 2147483646),
       expires_at = case when expires_at > statement_timestamp() then expires_at end
 where id = any(array(
    select m.id
      from django_mq_queuedmessage m
     where m.id = any(%(ids)s::bigint[]) and m.dead_at is not null
       and (m.unique_id is null or m.id = any(%(unique)s::bigint[]))
       for no key update skip locked))
returning id
"""


def requeue(
    cursor: Cursor, *, ids: Sequence[int], attempts: int, unique: Sequence[int] = ()
) -> list[int]:
    """Give the dead letters `ids` at least `attempts` more attempts, due now.

    Dead letters with a unique id must be in `unique`, after they have taken their id again.
    """
    cursor.execute(REQUEUE, {"ids": list(ids), "attempts": attempts, "unique": list(unique)})
    return _ids(cursor)


# A due message keeps its place in the queue; one that its key blocks keeps its order.
RUN_NOW = f"""
update django_mq_queuedmessage
   set processable_after = least(processable_after, statement_timestamp()), held_since = null
 where id = any(array(
    select m.id
      from django_mq_queuedmessage m
     where m.id = any(%(ids)s::bigint[])
       and {WAITS}
       and (m.expires_at is null or m.expires_at > statement_timestamp())
       for no key update skip locked))
returning id
"""


def run_now(cursor: Cursor, *, ids: Sequence[int]) -> list[int]:
    """Make the delayed, retrying and held messages among `ids` due now."""
    cursor.execute(RUN_NOW, {"ids": list(ids)})
    return _ids(cursor)


def _ids(cursor: Cursor) -> list[int]:
    return [row[0] for row in cursor.fetchall()]
