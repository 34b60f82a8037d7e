"""Which messages wait behind which: the heads of lines, and the position of a message in its line.

A line is (queue, handler, key), or an ordered queue. Its head is the row with the lowest id;
`skipping` names the queues in which it is the lowest that is not dead. Every count stops at a
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.store import Cursor

# One probe per message with others parked behind it, the oldest first, up to `examined`: 0.1 s for
# 10,000. Rows of one line may be parked behind different messages, some of which are gone. With key
# = line.key, the planner may scan the primary key (see claim_keyed).
BLOCKED = """
with recursive blocker (id, queue, handler, key, n) as (
    (select m.blocked_by, m.queue, m.handler, m.key, 1
       from django_mq_queuedmessage m
      where m.blocked_by is not null
      order by m.blocked_by
      limit 1)
    union all
    select following.*, blocker.n + 1
      from blocker
     cross join lateral (
        select m.blocked_by, m.queue, m.handler, m.key
          from django_mq_queuedmessage m
         where m.blocked_by > blocker.id
         order by m.blocked_by
         limit 1
     ) following
     where blocker.n < %(examined)s
), line as (
    select blocker.queue, blocker.handler, blocker.key
      from blocker
     where blocker.key is not null
       and (%(queue)s::text is null or blocker.queue = %(queue)s)
       and blocker.queue <> all(%(ordered)s::text[])
     group by blocker.queue, blocker.handler, blocker.key
     order by min(blocker.id)
     limit %(limit)s
), keyed as (
    select line.queue, line.handler, line.key, head.id, behind.n
      from line
     cross join lateral (
        select m.id
          from django_mq_queuedmessage m
         where m.queue = line.queue and m.handler = line.handler
           and m.key >= line.key and m.key <= line.key
           and (m.dead_at is null or line.queue <> all(%(skipping)s::text[]))
         order by m.key, m.id
         limit 1
     ) head
     cross join lateral (
        select count(*) as n
          from (
            select
              from django_mq_queuedmessage m
             where m.queue = line.queue and m.handler = line.handler
               and (m.key, m.id) > (line.key, head.id) and m.key <= line.key
               and m.dead_at is null
             order by m.key, m.id
             limit %(maximum)s
          ) m
     ) behind
), ordered as (
    select line.queue, head.handler, null as key, head.id, behind.n
      from unnest(%(ordered)s::text[]) as line (queue)
     cross join lateral (
        select m.id, m.handler, m.dead_at, m.leased_until, m.processable_after
          from django_mq_queuedmessage m
         where m.queue >= line.queue and m.queue <= line.queue and m.ordered
           and (m.dead_at is null or line.queue <> all(%(skipping)s::text[]))
         order by m.queue, m.id
         limit 1
     ) head
     cross join lateral (
        select count(*) as n
          from (
            select
              from django_mq_queuedmessage m
             where (m.queue, m.id) > (line.queue, head.id) and m.queue <= line.queue
               and m.ordered and m.dead_at is null
             order by m.queue, m.id
             limit %(maximum)s
          ) m
     ) behind
     where (%(queue)s::text is null or line.queue = %(queue)s)
       and (head.dead_at is not null
            or head.leased_until is null and head.processable_after > statement_timestamp())
)
select queue, handler, key, id, n from keyed where n > 0
 union all
select queue, handler, key, id, n from ordered where n > 0
 order by 4
 limit %(limit)s
"""


class Blocking(NamedTuple):
    """A line, its head `id`, and how many live messages are behind the head.

    For an ordered queue `key` is None, and `handler` is that of the head.
    """

    queue: str
    handler: str
    key: str | None
    id: int
    behind: int


def blocked(
    cursor: Cursor,
    *,
    queue: str | None,
    ordered: Sequence[str],
    skipping: Sequence[str],
    limit: int,
    maximum: int,
    examined: int,
) -> list[Blocking]:
    """Return the lines with parked messages, and the `ordered` queues that do not move.

    Returns at most `limit` lines, the lowest head first, among those of the `examined` oldest
    messages with others parked behind them. Counts stop at `maximum`.
    """
    cursor.execute(
        BLOCKED,
        {
            "queue": queue,
            "ordered": list(ordered),
            "skipping": list(skipping),
            "limit": limit,
            "maximum": maximum,
            "examined": examined,
        },
    )
    return [Blocking._make(row) for row in cursor.fetchall()]


# Formatted by `_positions()`.
_POSITIONS = """
select asked.id, head.id, in_flight.id, ahead.n, behind.n
  from asked
  left join lateral (
    select m.id
      from django_mq_queuedmessage m
     where {line} and {before} and (m.dead_at is null or not asked.skips)
     order by {by}, m.id
     limit 1
  ) head on true
  left join lateral (
    select m.id
      from django_mq_queuedmessage m
     where {excluding} and m.leased_until is not null and m.id <> asked.id
     limit 1
  ) in_flight on true
 cross join lateral (
    select count(*) as n
      from (
        select
          from django_mq_queuedmessage m
         where {line} and {before} and (m.dead_at is null or not asked.skips)
         order by {by} desc, m.id desc
         limit %(maximum)s
      ) m
 ) ahead
 cross join lateral (
    select count(*) as n
      from (
        select
          from django_mq_queuedmessage m
         where {line} and {after} and m.dead_at is null
           and not (asked.dead and asked.skips)
         order by {by}, m.id
         limit %(maximum)s
      ) m
 ) behind
"""


def _positions(line: str, *, by: str, excluding: str) -> str:
    """Return the statement for rows m of the same `line` as a row of `asked`, ordered by `by`, id.

    A claimed row that satisfies `excluding` keeps all others of the line from being claimed,
    including earlier ones that became visible later.
    """
    # Not by id alone: the planner might scan the primary key instead of the line. Not with `by` =
    # value or with both bounds, either: the scan would start at the bound, not at the asked row.
    value = by.replace("m.", "asked.")
    before = f"({by}, m.id) < ({value}, asked.id) and {by} >= {value}"
    after = f"({by}, m.id) > ({value}, asked.id) and {by} <= {value}"
    return _POSITIONS.format(line=line, by=by, excluding=excluding, before=before, after=after)


_HANDLER = "m.queue = asked.queue and m.handler = asked.handler"
_KEYED = _positions(
    _HANDLER,
    by="m.key",
    excluding=f"{_HANDLER} and m.key >= asked.key and m.key <= asked.key",
)
_ORDERED = _positions("m.ordered", by="m.queue", excluding="m.queue = asked.queue")
LINE_POSITIONS = f"""
with asked as materialized (
    select m.id, m.queue, m.handler, m.key, m.ordered, m.dead_at is not null as dead,
           m.queue = any(%(ordered)s::text[]) as queue_is_ordered,
           m.queue = any(%(skipping)s::text[]) as skips
      from django_mq_queuedmessage m
     where m.id = any(%(ids)s::bigint[])
)
{_KEYED}
 where asked.key is not null and not asked.queue_is_ordered
 union all
{_ORDERED}
 where asked.ordered and asked.queue_is_ordered
"""


class LinePosition(NamedTuple):
    """The position of message `id` in its line.

    `head` is the head of the line (None: the message itself), `in_flight` another message of the
    line that is in flight; `ahead` messages come before it, `behind` live ones after it.
    """

    id: int
    head: int | None
    in_flight: int | None
    ahead: int
    behind: int

    @property
    def waits_for(self) -> int | None:
        """The message that must end before this one can be claimed, or None."""
        return self.in_flight if self.head is None else self.head


def line_positions(
    cursor: Cursor,
    *,
    ids: Sequence[int],
    ordered: Sequence[str],
    skipping: Sequence[str],
    maximum: int,
) -> dict[int, LinePosition]:
    """Return, by id, the positions of those of `ids` that are in a line.

    Counts stop at `maximum`.
    """
    cursor.execute(
        LINE_POSITIONS,
        {
            "ids": list(ids),
            "ordered": list(ordered),
            "skipping": list(skipping),
            "maximum": maximum,
        },
    )
    return {row[0]: LinePosition._make(row) for row in cursor.fetchall()}
