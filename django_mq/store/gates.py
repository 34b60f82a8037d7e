"""Gates: which queues are open to claims, and for how many where the fleet is to hold back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from django_mq.store import Cursor


def is_open(queue: str) -> str:
    """Return the condition that what the SQL text `queue` names may be claimed from.

    A queue that is paused is closed. One that backs off, or that may have only so many messages
    in flight, is open to those who were `admitted`: they hold its gate.
    """
    return f"""not exists (
                select from django_mq_queuestate s
                 where s.queue = {queue}
                   and (s.paused_at is not null
                        and (s.paused_until is null or s.paused_until > statement_timestamp())
                        or not %(admitted)s
                        and (s.backoff_level > 0 or s.max_in_flight is not null)))"""


# One claim at a time for such a queue, over the fleet: what is counted next is still true when
# the claim commits. A statement of its own, so that the next one's snapshot follows the lock.
# Not waited for: a worker that froze in its claim would stop all others, and their other queues.
ENTER = "select pg_try_advisory_xact_lock(hashtextextended(%(queue)s, 2))"

READ = """
select coalesce(s.backoff_level, 0), allowed.most,
       case when allowed.most is not null then (
            select count(*)
              from (
                select
                  from django_mq_queuedmessage m
                 where m.queue = %(queue)s and m.leased_until is not null
                 limit allowed.most
              ) leased)
       end
  from (select) one
  left join django_mq_queuestate s on s.queue = %(queue)s
 cross join lateral (select coalesce(s.max_in_flight, %(limit)s::int) as most) allowed
"""


class Gate(NamedTuple):
    """The level of the queue's backoff, how many may be in flight (None: any), how many are."""

    level: int
    most: int | None
    in_flight: int | None

    @property
    def room(self) -> int | None:
        """How many more may be claimed; None: any."""
        return None if self.most is None else max(0, self.most - (self.in_flight or 0))


def enter(cursor: Cursor, *, queue: str, limit: int | None) -> Gate | None:
    """Take the gate of `queue` and return how it stands; it is held until the commit.

    None while somebody else has it. `limit` is what the settings say; what was decided while
    running goes before it.
    """
    cursor.execute(ENTER, {"queue": queue})
    if not cursor.fetchone()[0]:
        return None
    cursor.execute(READ, {"queue": queue, "limit": limit})
    return Gate._make(cursor.fetchone())
