"""Select the messages that an operator changes, queue by queue in index order, and group them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from django_mq.store import Cursor, queue_names
from django_mq.store.conditions import UNCLAIMED, WAITS
from django_mq.store.error_groups import failed_last_with
from django_mq.store.readers import prepare_to_read

#: Dead letters, messages that wait for a time (delayed, retrying or held), or all.
Among = Literal["dead", "later", "all"]


class Selection(NamedTuple):
    """Which messages to select (None: any).

    `older_than` is in seconds since the message died, or since the broadcast if it is alive.
    """

    queue: str | None = None
    type: str | None = None
    handler: str | None = None
    key: str | None = None
    fingerprint: str | None = None
    older_than: float | None = None
    limit: int | None = None


_IS_DEAD = "m.dead_at is not null"
_IS_LATER = f"""{WAITS}
           and (m.processable_after > statement_timestamp() or m.held_since is not null)
           and (m.expires_at is null or m.expires_at > statement_timestamp())"""
_CONDITIONS: dict[Among, str] = {"dead": _IS_DEAD, "later": _IS_LATER, "all": "true"}

# An id is looked up without other conditions. With the condition of a partial index, the server may
# read that whole index for each id, if its statistics say that the table is empty: after an outage,
# to requeue 50,000 of 200,000 dead letters took 207 s.
_KEEP_SELECTABLE = """
select m.id
  from unnest(%(ids)s::bigint[]) as asked (id)
 cross join lateral (
    select m.id, m.dead_at, m.leased_until, m.blocked_by, m.held_since, m.expires_at,
           m.processable_after
      from django_mq_queuedmessage m
     where m.id = asked.id
    offset 0
 ) m
 where {condition}
 order by m.dead_at, m.id
"""
KEEP_SELECTABLE = {
    among: _KEEP_SELECTABLE.format(condition=condition) for among, condition in _CONDITIONS.items()
}


def keep_selectable(cursor: Cursor, *, ids: Sequence[int], among: Among) -> list[int]:
    """Return which of `ids` are stored and `among` those, longest dead first."""
    cursor.execute(KEEP_SELECTABLE[among], {"ids": list(ids)})
    return [row[0] for row in cursor.fetchall()]


def _of_queue(condition: str, *, by: str, since: str) -> str:
    """Return a query for the rows of `asked.queue` that satisfy an index's condition, in its order.

    `since` is the column from which the age counts.
    """
    return f"""
    select found.*
      from (
        select m.id, m.dead_at, m.processable_after
          from django_mq_queuedmessage m
         where m.queue = asked.queue and {condition}
           and (%(type)s::text is null or m.type = %(type)s)
           and (%(handler)s::text is null or m.handler = %(handler)s)
           and (%(key)s::text is null or m.key = %(key)s)
           and (%(fingerprint)s::text is null or {failed_last_with("%(fingerprint)s::text")})
           and (%(older_than)s::float8 is null
                or {since} <= statement_timestamp()
                              - make_interval(secs => %(older_than)s::float8))
         order by {by}
         limit %(limit)s
     ) found"""


_DEAD = _of_queue(_IS_DEAD, by="m.dead_at, m.id", since="m.dead_at")
_LATER = _of_queue(_IS_LATER, by="m.processable_after, m.id", since="m.created_at")
# A blocked row has a key, so these four cover every row.
_ALL = " union all ".join(
    (
        _DEAD,
        _of_queue(
            f"{UNCLAIMED} and m.blocked_by is null",
            by="m.priority desc, m.processable_after, m.id",
            since="m.created_at",
        ),
        _of_queue("m.leased_until is not null", by="m.leased_until, m.id", since="m.created_at"),
        _of_queue(
            f"{UNCLAIMED} and m.key is not null and m.blocked_by is not null",
            by="m.handler, m.key, m.id",
            since="m.created_at",
        ),
    )
)
_FIND = """
select m.id
  from unnest(%(queues)s::text[]) as asked (queue)
 cross join lateral ({rows}
 ) m
 order by {by}, m.id
 limit %(limit)s
"""
FIND: dict[Among, str] = {
    "dead": _FIND.format(rows=_DEAD, by="m.dead_at"),
    "later": _FIND.format(rows=_LATER, by="m.processable_after"),
    "all": _FIND.format(rows=_ALL, by="m.dead_at"),
}


def find(cursor: Cursor, wanted: Selection, *, among: Among) -> list[int]:
    """Return the ids of messages: those that died, or are due, first come first.

    Reads no rows of other queues and, among dead letters, no rows of live messages.
    """
    names = sorted(queue_names.names(cursor)) if wanted.queue is None else [wanted.queue]
    prepare_to_read(cursor)
    cursor.execute(FIND[among], {**wanted._asdict(), "queues": names})
    return [row[0] for row in cursor.fetchall()]


WITH_SUCCESSOR = """
select id
  from (
    select m.id, lead(m.id) over (
               partition by m.queue, m.handler, m.type, m.unique_id order by m.id) as successor
      from unnest(%(ids)s::bigint[]) as asked (id)
     cross join lateral (
        select m.id, m.queue, m.handler, m.type, m.unique_id, m.dead_at
          from django_mq_queuedmessage m
         where m.id = asked.id
        offset 0
     ) m
     where m.dead_at is not null and m.unique_id is not null
  ) found
 where successor is not null
"""


def with_successor(cursor: Cursor, *, ids: Sequence[int]) -> set[int]:
    """Return the dead letters among `ids` after which another of them has the same unique id."""
    cursor.execute(WITH_SUCCESSOR, {"ids": list(ids)})
    return {row[0] for row in cursor.fetchall()}


# An error is stored as its class and its text, which may be as private as a payload; the reason of
# a snooze or a hold is only a text.
GROUPS = r"""
select count(*), case when dead_at is null then 'waiting' else 'dead' end,
       queue, type, handler,
       case when last_error ~ '^[A-Za-z_][\w.]*(:|$)'
            then split_part(last_error, ':', 1) else '' end
  from django_mq_queuedmessage
 where id = any(%(ids)s::bigint[])
 group by 2, 3, 4, 5, 6
 order by 1 desc, 2, 3, 4, 5, 6
 limit %(limit)s
"""


class Group(NamedTuple):
    """Messages of the same kind; `state` is dead or waiting, `error` the class of the last error.

    `error` is empty if there was none, or only a reason to wait.
    """

    messages: int
    state: str
    queue: str
    type: str
    handler: str
    error: str


def groups(cursor: Cursor, ids: Sequence[int], *, limit: int) -> list[Group]:
    """Return the largest `limit` groups of the messages with these `ids`, the largest first."""
    cursor.execute(GROUPS, {"ids": list(ids), "limit": limit})
    return [Group._make(row) for row in cursor.fetchall()]
