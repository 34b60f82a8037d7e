"""Settle the messages of a dead worker process: charge those it ran, release the others."""

from __future__ import annotations

from collections.abc import Sequence

from django_mq.messages import ClaimedRow, Fence
from django_mq.store import LOCK_SKIPPING, Cursor, fence_columns, fenced
from django_mq.store.claimed_row import REFUNDED, claimed_columns

_CLAIMED = """
      from django_mq_queuedmessage m
     where m.leased_until is not null and starts_with(m.claimed_by, %(prefix)s)
       and m.id <> all(%(kept)s::bigint[])
       and (%(claimers)s::text[] is null or m.claimed_by = any(%(claimers)s::text[]))
"""

RELEASE_ALL_EXCEPT = f"""
with ours as materialized (
    select m.id{_CLAIMED}
       for no key update of m skip locked
)
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null, attempts = {REFUNDED}
 where m.id = any(array(select id from ours))
returning m.id
"""


def release_all_except(
    cursor: Cursor,
    *,
    worker: str,
    kept: Sequence[int],
    claimers: Sequence[str] | None = None,
) -> set[int]:
    """Release every message that worker process `worker` claimed, except the ids `kept`.

    With `claimers`, only those of these claims. Skips rows that the worker's dying connection still
    has locked: call it again.
    """
    cursor.execute(RELEASE_ALL_EXCEPT, _claimed(worker, kept, claimers))
    return {row[0] for row in cursor.fetchall()}


CLAIMED = f"select m.id, m.attempts, m.claimed_by{_CLAIMED}"


def claimed_except(
    cursor: Cursor,
    *,
    worker: str,
    kept: Sequence[int],
    claimers: Sequence[str] | None = None,
) -> list[Fence]:
    """Return the messages that `release_all_except()` would release."""
    cursor.execute(CLAIMED, _claimed(worker, kept, claimers))
    return [Fence._make(row) for row in cursor.fetchall()]


def _claimed(worker: str, kept: Sequence[int], claimers: Sequence[str] | None) -> dict[str, object]:
    return {
        "prefix": f"{worker}:",
        "kept": list(kept),
        "claimers": None if claimers is None else list(claimers),
    }


LOCK_RUNNING = f"""
select {claimed_columns()}
  from {fenced("m.*", last=LOCK_SKIPPING)}
"""


def lock_running(cursor: Cursor, fences: Sequence[Fence]) -> list[ClaimedRow]:
    """Lock and return the messages of `fences` that are still claimed and not locked."""
    cursor.execute(LOCK_RUNNING, fence_columns(fences))
    return [ClaimedRow._make(row) for row in cursor.fetchall()]


REMAINING = """
select exists (
    select from django_mq_queuedmessage m
     where m.leased_until is not null and starts_with(m.claimed_by, %(prefix)s))
"""


def anything_left(cursor: Cursor, *, worker: str) -> bool:
    """Return whether worker process `worker` still has a claimed message."""
    cursor.execute(REMAINING, {"prefix": f"{worker}:"})
    return bool(cursor.fetchone()[0])


BACKDATE = """
update django_mq_failedattempt a
   set started_at = a.started_at - make_interval(secs => %(seconds)s),
       ended_at = a.ended_at - make_interval(secs => %(seconds)s)
  from unnest(%(ids)s::bigint[], %(attempts)s::int[]) as charged (id, attempt)
 where a.message_id = charged.id and a.attempt = charged.attempt
   and a.ended_at >= transaction_timestamp()
"""


def backdate(cursor: Cursor, fences: Sequence[Fence], *, seconds: float) -> None:
    """Backdate the failed attempts that this transaction recorded: they ended `seconds` ago."""
    cursor.execute(BACKDATE, {**fence_columns(fences), "seconds": max(0.0, seconds)})
