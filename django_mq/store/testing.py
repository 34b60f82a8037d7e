"""Move time, for tests: make later messages due now, and end the waits of queues."""

from __future__ import annotations

from datetime import datetime

from django_mq.store import Cursor

# One microsecond apart, all in the past, so that they keep their order. A message that is held was
# held for longer by then: its next wait grows, until it is dead. No worker holds it for more than 5
# minutes at a time.
MAKE_DUE = """
with later as materialized (
    select m.id, row_number() over (order by m.processable_after desc, m.id desc) as ordinal
      from django_mq_queuedmessage m
     where m.processable_after > statement_timestamp()
       and m.leased_until is null and m.dead_at is null
       and (%(queue)s::text is null or m.queue = %(queue)s)
       and (%(until)s::timestamptz is null or m.processable_after <= %(until)s::timestamptz)
)
update django_mq_queuedmessage m
   set processable_after = statement_timestamp() - later.ordinal * interval '1 microsecond',
       held_since = m.held_since
                  - least(m.processable_after - statement_timestamp(), interval '5 minutes')
  from later
 where m.id = later.id
returning m.id
"""

# Its next message is the probe, as after the wait.
END_WAITS = """
update django_mq_queuestate s
   set backoff_until = statement_timestamp()
 where s.backoff_until > statement_timestamp()
   and (%(queue)s::text is null or s.queue = %(queue)s)
   and (%(until)s::timestamptz is null or s.backoff_until <= %(until)s::timestamptz)
"""


def make_due(cursor: Cursor, *, queue: str | None, until: datetime | None = None) -> int:
    """Make delayed, retrying and held messages due now, and end backoff waits; return how many.

    With `until`, only messages that are due by then, and waits that are over by then. The number is
    that of the messages.
    """
    chosen = {"queue": queue, "until": until}
    cursor.execute(END_WAITS, chosen)
    cursor.execute(MAKE_DUE, chosen)
    return len(cursor.fetchall())
