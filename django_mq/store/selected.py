"""The groups in a selection of messages, shown before an operator acts on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.store import Cursor

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
