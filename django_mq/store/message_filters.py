"""Messages that match a filter and to which an action applies: counted, and page by page.

A page looks at a bounded range of ids, whatever the filter finds there.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from django_mq.policy.message_filter import MessageFilter
from django_mq.store import Cursor
from django_mq.store.conditions import UNCLAIMED
from django_mq.store.error_groups import failed_last_with
from django_mq.store.gates import IS_PAUSED

#: Messages, matching or not, that one statement looks at.
WINDOW = 10_000

#: The messages that an action applies to.
ACTION_CONDITIONS = {
    "requeue": "m.dead_at is not null",
    "discard": "m.dead_at is not null",
    "cancel": UNCLAIMED,
    "run_now": f"{UNCLAIMED} and m.blocked_by is null"
    " and (m.expires_at is null or m.expires_at > statement_timestamp())",
}
# Like `states.state_expression()`; a test compares the two. This one ignores which worker has a
# message: no action applies to one in flight.
_STATE = f"""case
    when m.dead_at is not null then 'dead'
    when m.leased_until is not null then 'in_flight'
    when m.blocked_by is not null then 'blocked'
    when m.held_since is not null then 'held'
    when m.expires_at <= statement_timestamp() then 'expired'
    when m.queue in (
        select s.queue
          from django_mq_queuestate s
         where {IS_PAUSED} or s.backoff_until > statement_timestamp()) then 'paused'
    when m.processable_after > statement_timestamp() and m.attempts > 0 then 'retrying'
    when m.processable_after > statement_timestamp() then 'delayed'
    else 'processable' end"""
_CONDITIONS = {
    "queues": "m.queue = any(%(queues)s::text[])",
    "state": f"{_STATE} = %(state)s",
    "handler": "m.handler = %(handler)s",
    "type": "(m.type = %(type)s"
    " or right(%(type)s, 1) = '*' and starts_with(m.type, left(%(type)s, -1)))",
    "id": "m.id = %(id)s",
    "key": "m.key = %(key)s",
    "unique_id": "m.unique_id = %(unique_id)s",
    "blocked_by": "m.blocked_by = %(blocked_by)s",
    "priority": "m.priority = %(priority)s",
    "fingerprint": failed_last_with("%(fingerprint)s"),
    "error_class": "(m.last_error = %(error_class)s"
    " or starts_with(m.last_error, %(error_class)s || ': '))",
    "worker": "(m.claimed_by = %(worker)s or starts_with(m.claimed_by, %(worker)s || ':'))",
    # As in the list, #7 is an id, or an order key.
    "search": "(m.key = %(search)s or m.id::text = regexp_replace(%(search)s, '^#', '')"
    " or (%(search)s !~ '^#[0-9]+$' and (m.type = %(search)s or m.unique_id = %(search)s)))",
    "since": "m.created_at >= %(since)s::timestamptz",
    "until": "m.created_at < %(until)s::timestamptz",
    "due_since": "m.processable_after >= %(due_since)s::timestamptz",
    "due_until": "m.processable_after < %(due_until)s::timestamptz",
    "dead_since": "m.dead_at >= %(dead_since)s::timestamptz",
    "dead_until": "m.dead_at < %(dead_until)s::timestamptz",
    "at_path": "(case when %(column)s = 'payload' then m.payload else m.metadata end"
    " #>> %(path)s::text[]) = %(at_path)s",
    "metadata": "m.metadata @> %(metadata)s::jsonb",
}


def where(wanted: MessageFilter, action: str) -> tuple[str, dict[str, Any]]:
    """Return the condition on `m` of a filter and of an action, and its parameters.

    With `heads`, the action applies to the heads of the lines of the matching messages, so the
    states of the matching messages do not matter.
    """
    params = wanted.as_json()
    applies = "true" if params.pop("heads", False) else ACTION_CONDITIONS[action]
    if "metadata" in params:
        params["metadata"] = json.dumps(params["metadata"])
    found = [applies, *(_CONDITIONS[name] for name in params if name != "path")]
    if "path" in params:
        params["column"], *params["path"] = params["path"]
    return "\n   and ".join(found), params


LAST = "select max(m.id) from django_mq_queuedmessage m"


def last_id(cursor: Cursor) -> int:
    """Return the largest id of a message that is stored now, 0 if there is none."""
    cursor.execute(LAST)
    return cursor.fetchone()[0] or 0


class Page(NamedTuple):
    """The ids of one page, and the id behind which the next page begins; None after the last."""

    ids: list[int]
    after: int | None


PAGE = """
with looked_at as materialized (
    select max(w.id) as last, count(*) as count
      from (
        select m.id
          from django_mq_queuedmessage m
         where m.id > %(after)s and m.id <= %(last)s
         order by m.id
         limit %(window)s
      ) w
)
select looked_at.last, looked_at.count, found.id
  from looked_at
  left join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.id > %(after)s and m.id <= looked_at.last
       and {where}
     order by m.id
     limit %(limit)s
  ) found on true
"""


def page(
    cursor: Cursor,
    wanted: MessageFilter,
    *,
    action: str,
    after: int,
    last: int,
    limit: int,
) -> Page:
    """Return up to `limit` matching ids of the next `WINDOW` behind `after`, up to id `last`."""
    condition, params = where(wanted, action)
    cursor.execute(
        PAGE.format(where=condition),
        {**params, "after": after, "last": last, "limit": limit, "window": WINDOW},
    )
    rows = cursor.fetchall()
    ids = sorted(row[2] for row in rows if row[2] is not None)
    end, looked_at, _ = rows[0]
    if len(ids) == limit:
        return Page(ids, ids[-1])
    return Page(ids, end if looked_at == WINDOW else None)


COUNT = """
select count(*)
  from django_mq_queuedmessage m
 where m.id <= %(last)s
   and {where}
"""


def count(cursor: Cursor, wanted: MessageFilter, *, action: str, last: int) -> int:
    """Return how many messages match, up to the id `last`; the caller limits the time."""
    condition, params = where(wanted, action)
    cursor.execute(COUNT.format(where=condition), {**params, "last": last})
    return int(cursor.fetchone()[0])
