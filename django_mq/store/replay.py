"""Read handled messages in order to broadcast them again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.readers import prepare_to_read


class PastMessage(NamedTuple):
    """A handled message; `payload` and `metadata` are JSON text, None where none was kept.

    `metadata` carries `mq.replay_of`, the id of the replayed message.
    """

    id: int
    queue: str
    type: str
    schema_version: int
    handler: str
    key: str | None
    priority: int
    payload: str | None
    metadata: str | None


class Filter(NamedTuple):
    """Which handled messages to read (None: any); the times are when they ended."""

    ids: Sequence[int] | None = None
    queue: str | None = None
    type: str | None = None
    handler: str | None = None
    since: datetime | None = None
    until: datetime | None = None


# `||` of an object and anything but an object makes an array.
_FIND = """
select h.id, h.queue, h.type, h.schema_version, h.handler, h.key, h.priority{content}
  from django_mq_handledmessage h
 where h.id > %(after)s
   and (%(ids)s::bigint[] is null or h.id = any(%(ids)s::bigint[]))
   and (%(queue)s::text is null or h.queue = %(queue)s)
   and (%(type)s::text is null or h.type = %(type)s)
   and (%(handler)s::text is null or h.handler = %(handler)s)
   and h.ended_at >= coalesce(%(since)s::timestamptz, '-infinity')
   and h.ended_at < coalesce(%(until)s::timestamptz, 'infinity')
 order by h.id
 limit %(limit)s
"""
FIND = _FIND.format(content=", null, null")
FIND_WITH_CONTENT = _FIND.format(
    content=""",
       h.payload::text,
       ((case when jsonb_typeof(h.metadata) = 'object' then h.metadata else '{}' end)
        || jsonb_build_object('mq.replay_of', h.id::text))::text"""
)


def find(
    cursor: Cursor, wanted: Filter, *, after: int, limit: int | None, with_content: bool
) -> list[PastMessage]:
    """Return up to `limit` handled messages with ids above `after`, in the order of their ids.

    `with_content` reads their payloads and metadata, too.
    """
    prepare_to_read(cursor)
    params = {**wanted._asdict(), "after": after, "limit": limit}
    cursor.execute(FIND_WITH_CONTENT if with_content else FIND, params)
    return [PastMessage._make(row) for row in cursor.fetchall()]
