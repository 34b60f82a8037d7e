"""Replies to requests, stored by the transaction that settles the message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.store import Cursor, arrays_of, notify

#: The error class of a request that gets no reply; a handler's own classes include their module.
UNANSWERED = "Unanswered"


class Reply(NamedTuple):
    """The stored reply to a request: `value` as JSON text, or None and an error."""

    id: int
    handler: str
    value: str | None
    error_class: str = ""
    error_text: str = ""


#: Not the channel of the workers, since a reply brings them no work; without payloads, too.
CHANNEL = "django_mq_replies"
LISTEN = f"listen {CHANNEL}"

# A dead message has its reply already, but may be requeued: the latest reply replaces it.
STORE = f"""
with stored as (
    insert into django_mq_result (message_id, handler, value, error_class, error_text)
    select id, handler, value::jsonb, error_class, error_text
      from unnest(%(id)s::bigint[], %(handler)s::text[], %(value)s::text[],
                  %(error_class)s::text[], %(error_text)s::text[])
           as answer (id, handler, value, error_class, error_text)
        on conflict (message_id) do update
       set handler = excluded.handler, value = excluded.value,
           error_class = excluded.error_class, error_text = excluded.error_text,
           created_at = statement_timestamp()
    returning message_id
)
select pg_notify('{CHANNEL}', '') from stored where %(ring)s and {notify.HAS_ROOM} limit 1
"""


def store(cursor: Cursor, replies: Sequence[Reply]) -> None:
    """Store the replies; notify waiting requests at the commit."""
    cursor.execute(STORE, {**arrays_of(Reply, replies), "ring": notify.is_enabled()})


# One statement, so one snapshot: the transaction that removes a message stores its result. A dead
# letter without a result is itself the reply: its worker vanished. A requeued message will get
# another reply, so the result that was stored at its death does not count.
REPLY_STATES = f"""
select wanted.id,
       m.dead_at is not null or (m.id is null and r.message_id is not null),
       m.id is not null,
       r.value::text,
       case when r.message_id is null then '{UNANSWERED}' else r.error_class end,
       case when r.message_id is null then concat_ws(': ', m.dead_reason, nullif(m.last_error, ''))
            else r.error_text end
  from unnest(%(ids)s::bigint[]) as wanted (id)
  left join lateral (
    select r.message_id, r.value, r.error_class, r.error_text
      from django_mq_result r
     where r.message_id = wanted.id
     limit 1
  ) r on true
  left join lateral (
    select m.id, m.dead_at, m.dead_reason, m.last_error
      from django_mq_queuedmessage m
     where m.id = wanted.id and m.wants_result
     limit 1
  ) m on true
"""


class ReplyState(NamedTuple):
    """The state of a request: `answered`, else `stored` while its message is still in the table.

    `value` is JSON text, or None with an error.
    """

    id: int
    answered: bool
    stored: bool
    value: str | None
    error_class: str
    error_text: str


def reply_states(cursor: Cursor, ids: Sequence[int]) -> list[ReplyState]:
    """Return the state of each request in `ids`."""
    cursor.execute(REPLY_STATES, {"ids": list(ids)})
    return [ReplyState._make(row) for row in cursor.fetchall()]
