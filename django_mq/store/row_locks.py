"""Lock the rows of claimed messages: build the queries, and read what the server returns.

The queries go through the simple protocol, so their values are literals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.messages import PlainFence
from django_mq.store import LOCK_SKIPPING, fence_columns, fence_values, fenced, literals


class LockResult(NamedTuple):
    """The result of locking: the ids that are `missing` or `expired`.

    `missing` messages belong to another claim, are gone, or are locked by another session.
    `expired` ones are locked, but no attempt may start. `xid` is the transaction's id, if any.
    """

    missing: set[int]
    expired: set[int]
    xid: str | None


LOCK = f"""
with locked as materialized (
    select m.id, m.expired
      from {fenced("m.id, m.expires_at <= statement_timestamp() as expired", last=LOCK_SKIPPING)}
)
select count(*), case when count(*) < cardinality(%(ids)s::bigint[]) then array_agg(id) end,
       array_agg(id) filter (where expired), pg_current_xact_id()::text
  from locked
"""

# A form for one row, which the server plans in half the time.
LOCK_ONE = """
select 1, null, case when m.expires_at <= statement_timestamp() then array[m.id] end,
       pg_current_xact_id()::text
  from django_mq_queuedmessage m
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
   for no key update of m skip locked
"""


def lock(fences: Sequence[PlainFence]) -> str:
    """Return the query that locks the rows of `fences`, except those locked by other sessions.

    `parse_lock_result()` reads its result.
    """
    return _filled_in(LOCK_ONE, LOCK, fences)


#: Seconds to wait for other sessions' locks on rows: enough for a renewal, which holds them for a
#: moment; an operator may hold one for an hour. Less than the server's deadlock_timeout (1 s): if
#: another session waits for us in turn, we give up first and it goes on.
LOCK_WAIT_SECONDS = 0.5

# The handler has already begun, so a lock that is held for a moment is worth waiting for. The
# timeout of the statement counts for all its locks together.
LOCK_ONE_WAITING, LOCK_WAITING = (
    f"set local statement_timeout = '{LOCK_WAIT_SECONDS}s';{query.replace(' skip locked', '')}"
    for query in (LOCK_ONE, LOCK)
)


def lock_waiting(fences: Sequence[PlainFence]) -> str:
    """Return the queries that lock rows, waiting up to `LOCK_WAIT_SECONDS` in all.

    The queries set statement_timeout until the end of the transaction, or until it is set again.
    `parse_lock_result()` reads their result.
    """
    return _filled_in(LOCK_ONE_WAITING, LOCK_WAITING, fences)


def _filled_in(one: str, many: str, fences: Sequence[PlainFence]) -> str:
    if len(fences) == 1:
        return one % literals(fence_values(fences[0]))
    return many % literals(fence_columns(fences))


def parse_lock_result(row: Sequence[bytes | None], fences: Sequence[PlainFence]) -> LockResult:
    """Return the result of `lock()` from the server's `row`, which is empty if it sent none."""
    count, ids, expired, xid = row or (b"0", None, None, None)
    missing: set[int] = set()
    if int(count or 0) < len(fences):
        missing = {fence[0] for fence in fences}.difference(_numbers(ids))
    return LockResult(missing, set(_numbers(expired)), xid.decode() if xid else None)


def _numbers(text: bytes | None) -> list[int]:
    return [int(number) for number in text[1:-1].split(b",")] if text else []
