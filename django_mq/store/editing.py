"""Change a waiting message: read its row under a lock, then write what an operator changed."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor


class EditableRow(NamedTuple):
    """The facts that decide whether a message may be changed; `digest` is its payload's."""

    type: str
    schema_version: int
    waits: bool
    expires_at: datetime | None
    digest: str


LOCK = """
select m.type, m.schema_version, m.leased_until is null and m.dead_at is null, m.expires_at,
       md5(m.payload::text)
  from django_mq_queuedmessage m
 where m.id = %(id)s
   for no key update
"""


def lock(cursor: Cursor, id: int) -> EditableRow | None:
    """Lock a message and return its EditableRow; None if the message is gone."""
    cursor.execute(LOCK, {"id": id})
    row = cursor.fetchone()
    return None if row is None else EditableRow._make(row)


WRITE = """
update django_mq_queuedmessage
   set payload = coalesce(%(payload)s::jsonb, payload),
       processable_after = coalesce(%(due)s::timestamptz, processable_after),
       priority = coalesce(%(priority)s::smallint, priority)
 where id = %(id)s and leased_until is null and dead_at is null
"""


def write(
    cursor: Cursor,
    id: int,
    *,
    payload: str | None = None,
    due: datetime | None = None,
    priority: int | None = None,
) -> None:
    """Change a waiting message that is locked; None keeps a value. `payload` is JSON text."""
    cursor.execute(WRITE, {"id": id, "payload": payload, "due": due, "priority": priority})
