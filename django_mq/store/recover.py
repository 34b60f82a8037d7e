"""Settle what a dead worker process held: what it ran is charged, the rest is given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_mq.messages import ClaimedRow
from django_mq.store import LOCKED, fence_columns, fenced
from django_mq.store.claimed import claimed_columns

if TYPE_CHECKING:
    from django_mq.messages import Fence
    from django_mq.store import Cursor

RELEASE_ALL_BUT = """
with ours as materialized (
    select m.id
      from django_mq_queuedmessage m
     where m.leased_until is not null and starts_with(m.claimed_by, %(prefix)s)
       and m.id <> all(%(running)s::bigint[])
       for no key update of m skip locked
)
update django_mq_queuedmessage
   set leased_until = null, claimed_by = null, attempts = attempts - 1
 where id = any(array(select id from ours))
returning id
"""


def release_all_but(cursor: Cursor, *, worker: str, running: Sequence[int]) -> set[int]:
    """Give back every message that worker process `worker` claimed, save the ids `running`.

    Rows that its dying connection still has locked are skipped: ask again.
    """
    cursor.execute(RELEASE_ALL_BUT, {"prefix": f"{worker}:", "running": list(running)})
    return {row[0] for row in cursor.fetchall()}


LOCK_RUNNING = f"""
select {claimed_columns()}
  from {fenced("m.*", last=LOCKED)}
"""  # noqa: S608  (made of our own texts)


def lock_running(cursor: Cursor, fences: Sequence[Fence]) -> list[ClaimedRow]:
    """Lock and return the messages of `fences` that nobody settled since."""
    cursor.execute(LOCK_RUNNING, fence_columns(fences))
    return [ClaimedRow._make(row) for row in cursor.fetchall()]


REMAINING = """
select exists (
    select from django_mq_queuedmessage m
     where m.leased_until is not null and starts_with(m.claimed_by, %(prefix)s))
"""


def anything_left(cursor: Cursor, *, worker: str) -> bool:
    """Say whether any message is still claimed by worker process `worker`."""
    cursor.execute(REMAINING, {"prefix": f"{worker}:"})
    return bool(cursor.fetchone()[0])
