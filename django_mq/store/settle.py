"""Settle a claimed message: ack, retry, dead-letter, snooze, hold or release.

Every statement names the fence (id, attempt and claimer): it leaves a message that another claim
has taken unchanged, and returns the ids that it did change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import Fence, PlainFence
from django_mq.store import (
    LOCK_SKIPPING,
    MATCHES_FENCE,
    array,
    arrays_of,
    fence_columns,
    fence_values,
    fenced,
    literals,
)
from django_mq.store.limits import Limits, set_local
from django_mq.store.row_locks import LOCK_WAIT_SECONDS

if TYPE_CHECKING:
    from django_mq.store import Cursor


EXISTING = "select id from django_mq_queuedmessage where id = any(%(ids)s::bigint[])"


def existing(cursor: Cursor, ids: Collection[int]) -> set[int]:
    """Return which of `ids` still exist, in whatever state."""
    cursor.execute(EXISTING, {"ids": array(ids)})
    return _ids(cursor)


STILL_OURS = f"""
select m.id
  from {fenced()}
"""


def still_ours(cursor: Cursor, fences: Sequence[Fence]) -> set[int]:
    """Return which ids of `fences` no other claim has taken, locked or not."""
    cursor.execute(STILL_OURS, fence_columns(fences))
    return _ids(cursor)


# The fence is in the statement's own WHERE, so PostgreSQL checks it again for a row that another
# session changed while this one waited.
ACK = f"""
delete from django_mq_queuedmessage m
 where {MATCHES_FENCE}
returning m.id
"""

#: After these statements, an ack of several messages in the transaction deletes them in the order
#: of their ids. A scan of the table, or of a bitmap, deletes them in the order of the table; so may
#: a plan that was kept from an ack without these settings.
ORDER_BY_ID = (
    "set local enable_seqscan = off; set local enable_bitmapscan = off;"
    " set local plan_cache_mode = force_custom_plan"
)


ACK_ONE = """
delete from django_mq_queuedmessage m
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
"""


def ack_alone(fences: Sequence[PlainFence]) -> str:
    """Return the query that acks `fences` in a transaction of its own and returns their ids.

    It goes through the simple protocol, where statements sent together are one transaction. It has
    the limits of the worker, and waits up to `LOCK_WAIT_SECONDS` for each lock of another session.
    """
    ack = f"{ACK_ONE} returning id" if len(fences) == 1 else ACK
    params = fence_values(fences[0]) if len(fences) == 1 else fence_columns(fences)
    return f"{set_local(Limits(lock=LOCK_WAIT_SECONDS))}; {ack % literals(params)}"


def ack(cursor: Cursor, fences: Sequence[PlainFence]) -> set[int]:
    """Delete the messages of `fences`, whose handlers are done; return the deleted ids."""
    if len(fences) == 1:
        cursor.execute(ACK_ONE, fence_values(fences[0]))
        return {fences[0][0]} if cursor.rowcount else set()
    cursor.execute(ACK, fence_columns(fences))
    if cursor.rowcount == len(fences):
        return {fence[0] for fence in fences}  # without reading the returned rows
    return _ids(cursor)


class FailedDelivery(NamedTuple):
    """One failed attempt, and the fate of its message.

    The message runs again at `at`, but no sooner than `delay` seconds from now; a `dead_reason`
    dead-letters it. `seconds` is how long the attempt ran, `place` the code that failed.
    """

    fence: Fence
    at: datetime | None
    delay: float
    dead_reason: str
    error_class: str
    error_text: str
    traceback: str
    last_error: str
    seconds: float
    suspect: bool = False
    place: str = ""


FAIL = """
with failed as materialized (
    select *
      from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[],
                  %(at)s::timestamptz[], %(delay)s::float8[], %(dead_reason)s::text[],
                  %(error_class)s::text[], %(error_text)s::text[], %(traceback)s::text[],
                  %(last_error)s::text[], %(seconds)s::float8[], %(suspect)s::bool[],
                  %(place)s::text[])
           as failed (id, attempt, claimer, at, delay, dead_reason,
                      error_class, error_text, traceback, last_error, seconds, suspect, place)
), changed as (
    update django_mq_queuedmessage m
       set leased_until = null, claimed_by = null, held_since = null,
           suspect = failed.suspect,
           processable_after = least(
               greatest(failed.at,
                        statement_timestamp() + make_interval(secs => failed.delay)),
               statement_timestamp() + interval '366 days'),
           last_error = failed.last_error,
           dead_at = case when failed.dead_reason <> '' then statement_timestamp() end,
           dead_reason = failed.dead_reason
      from failed
     where m.id = any(%(ids)s::bigint[])
       and m.id = failed.id and m.attempts = failed.attempt and m.claimed_by = failed.claimer
    returning m.id, m.queue, m.type, m.handler, failed.attempt, failed.claimer, failed.seconds,
              failed.error_class, failed.error_text, failed.traceback, failed.place
)
insert into django_mq_failedattempt
       (message_id, queue, type, handler, attempt, worker, started_at, ended_at,
        error_class, error_text, traceback, place)
select id, queue, type, handler, attempt, split_part(claimer, ':', 1),
       statement_timestamp() - make_interval(secs => seconds), statement_timestamp(),
       error_class, error_text, traceback, place
  from changed
returning message_id
"""


def fail(cursor: Cursor, failures: Sequence[FailedDelivery]) -> set[int]:
    """Retry or dead-letter messages and record their failed attempts; return the ids changed."""
    fields = arrays_of(FailedDelivery, failures)
    cursor.execute(FAIL, {**fields, **fence_columns(fields["fence"])})
    return _ids(cursor)


class SnoozedDelivery(NamedTuple):
    """A message to postpone until `at`, else by `delay` seconds; `reason` is its last error."""

    fence: Fence
    at: datetime | None
    delay: float
    reason: str = ""


SNOOZE = """
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null, held_since = null, suspect = false,
       attempts = m.attempts - 1,
       last_error = case when snoozed.reason <> '' then snoozed.reason
                         when m.held_since is null then m.last_error
                         else '' end,
       processable_after = greatest(
           least(coalesce(snoozed.at,
                          statement_timestamp() + make_interval(secs => snoozed.delay)),
                 statement_timestamp() + interval '366 days'),
           statement_timestamp() + interval '0.1 s')
  from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[],
              %(at)s::timestamptz[], %(delay)s::float8[], %(reason)s::text[])
       as snoozed (id, attempt, claimer, at, delay, reason)
 where m.id = any(%(ids)s::bigint[])
   and m.id = snoozed.id and m.attempts = snoozed.attempt and m.claimed_by = snoozed.claimer
returning m.id
"""


def snooze(cursor: Cursor, snoozes: Sequence[SnoozedDelivery]) -> set[int]:
    """Postpone messages and refund their attempts; return the ids changed.

    The minimum delay is 0.1 s: nothing else slows down a handler that always snoozes. Without a
    reason, the last error stays, unless it says why the message was held.
    """
    fields = arrays_of(SnoozedDelivery, snoozes)
    cursor.execute(SNOOZE, {**fields, **fence_columns(fields["fence"])})
    return _ids(cursor)


class Hold(NamedTuple):
    """A message that cannot run here, why, and the seconds until a worker looks at it again."""

    fence: Fence
    reason: str
    delay: float


HOLD = """
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null,
       attempts = m.attempts - 1,
       held_since = coalesce(m.held_since, statement_timestamp()),
       last_error = held.reason,
       processable_after = statement_timestamp() + make_interval(secs => held.delay)
  from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[],
              %(reason)s::text[], %(delay)s::float8[])
       as held (id, attempt, claimer, reason, delay)
 where m.id = any(%(ids)s::bigint[])
   and m.id = held.id and m.attempts = held.attempt and m.claimed_by = held.claimer
returning m.id
"""


def hold(cursor: Cursor, holds: Sequence[Hold]) -> set[int]:
    """Hold messages and refund their attempts; return the ids changed."""
    fields = arrays_of(Hold, holds)
    cursor.execute(HOLD, {**fields, **fence_columns(fields["fence"])})
    return _ids(cursor)


DEAD_LETTER_UNSTARTED = """
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null, suspect = false,
       attempts = m.attempts - 1,
       dead_at = statement_timestamp(), dead_reason = unstarted.reason
  from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[], %(reasons)s::text[])
       as unstarted (id, attempt, claimer, reason)
 where m.id = any(%(ids)s::bigint[])
   and m.id = unstarted.id and m.attempts = unstarted.attempt and m.claimed_by = unstarted.claimer
returning m.id
"""


def dead_letter_unstarted(cursor: Cursor, reasons: Mapping[Fence, str]) -> set[int]:
    """Dead-letter messages whose attempt never started; return the ids changed.

    They expired, or were held too long.
    """
    params = {**fence_columns(reasons), "reasons": list(reasons.values())}
    cursor.execute(DEAD_LETTER_UNSTARTED, params)
    return _ids(cursor)


# processable_after is unchanged: a released message keeps its place in the queue.
RELEASE = f"""
update django_mq_queuedmessage
   set leased_until = null, claimed_by = null, attempts = attempts - 1
 where id = any(array(
    select m.id
      from {fenced(last=LOCK_SKIPPING)}))
returning id
"""


def release(cursor: Cursor, fences: Sequence[Fence]) -> set[int]:
    """Release messages that never started: refund the attempt, keep the place in the queue."""
    cursor.execute(RELEASE, fence_columns(fences))
    return _ids(cursor)


def _ids(cursor: Cursor) -> set[int]:
    return {row[0] for row in cursor.fetchall()}
