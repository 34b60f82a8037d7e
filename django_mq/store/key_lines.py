"""The lines of keys that a claim may take from: found in a window of waiting rows, and locked.

The line of a key is (queue, handler, key). An advisory lock keeps two claims from the same line. A
separate statement takes it, so that the snapshot of the claim is newer than the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django_mq.store import array, texts
from django_mq.store.advisory_locks import KEYED_CLAIM
from django_mq.store.claim import EXCLUDED, OPEN_LANES, excluding

if TYPE_CHECKING:
    from django_mq.store import Cursor


def _seen(condition: str = "", lock: str = "") -> str:
    """Return the window: the first waiting rows of the lanes, in the order of claims.

    seen_n numbers them. `condition` and `lock`, a locking clause, are for each row.
    """
    return f"""
    select window_.*, row_number() over () as seen_n
      from (
        select row_.*
          from ({OPEN_LANES}) lane
         cross join lateral (
            select m.id, m.queue, m.handler, m.key, m.priority, m.processable_after as at
              from django_mq_queuedmessage m
             where m.queue = lane.queue and m.priority = lane.priority
               and m.leased_until is null and m.blocked_by is null and m.dead_at is null
               and (m.processable_after, m.id) > (lane.at, lane.id)
               and m.processable_after <= statement_timestamp() {EXCLUDED}
               {condition}
             order by m.processable_after, m.id
             limit %(window)s
             {lock}
         ) row_
         limit %(window)s
      ) window_
"""


SEEN = _seen()
#: The window without lines that were tried, and without rows that other sessions have locked. Its
#: own rows are locked.
SEEN_UNLOCKED = _seen(
    """and (m.key is null or (m.queue, m.handler, m.key) not in (
                   select *
                     from unnest(%(tried_queues)s::text[], %(tried_handlers)s::text[],
                                 %(tried_keys)s::text[])))""",
    "for no key update skip locked",
)

# With key = line.key, the planner may scan mq_lease, over all rows leased since the oldest held
# snapshot was taken: 300 pages per line among 2,000 dead leases.
NONE_LEASED = """
           (select m.id
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler
               and m.key >= line.key and m.key <= line.key
               and m.leased_until is not null
             order by m.key
             limit 1) is null
"""

# OFFSET 0: only lines with nothing in flight are locked; the limit counts only lines that no other
# session has locked. The claim itself finds out whether the head waits.
LOCK_LINES = f"""
with seen as materialized ({SEEN}), line as (
    select queue, handler, key, min(seen_n) as seen_n
      from seen
     where key is not null
     group by queue, handler, key
     order by min(seen_n)
)
select line.queue, line.handler, line.key, line.seen_n
  from (
    select line.*
      from line
     where {NONE_LEASED}
    offset 0
  ) line
 where pg_try_advisory_xact_lock(
           hashtextextended(line.queue || ' ' || line.handler || ' ' || line.key, {KEYED_CLAIM}))
 limit %(limit)s
"""

LOCK_UNLOCKED_LINES = LOCK_LINES.replace(SEEN, SEEN_UNLOCKED)


def lock(
    cursor: Cursor,
    given: Mapping[str, object],
    *,
    limit: int,
    excluded: Sequence[int],
    unlocked: bool = False,
) -> list[tuple[Any, ...]]:
    """Lock up to `limit` lines that have a row in the window and none in flight, until the commit.

    Returns queue, handler, key and `seen_n` of the first row seen of each. `given` has the lanes,
    the window and `admitted`; rows in `excluded` do not count as waiting. If `unlocked`, neither do
    rows that other sessions have locked, and the lines in `given` that were tried.
    """
    statement = LOCK_UNLOCKED_LINES if unlocked else LOCK_LINES
    cursor.execute(excluding(statement, excluded), {**given, "limit": limit})
    return cursor.fetchall()


def columns(role: str, lines: Sequence[Sequence[Any]]) -> dict[str, object]:
    """Return lines, as `lock()` returns them, as parameters for statements: parallel arrays.

    `role` is `line` for those to claim from, `tried` for those that an earlier claim tried.
    """
    *names, numbers = zip(*lines, strict=True) if lines else ((),) * 4
    arrays = zip(("queues", "handlers", "keys"), map(texts, names), strict=True)
    return {f"{role}_{name}": each for name, each in (*arrays, ("starts", array(numbers)))}
