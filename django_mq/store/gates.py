"""Gates: which queues are open to claims, and for how many where a fleet-wide limit applies."""

from __future__ import annotations

from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.advisory_locks import GATE

#: The condition that the queue of the QueueState `s` is paused; never null.
IS_PAUSED = """(s.paused_at is not null
       and (s.paused_until is null or s.paused_until > statement_timestamp()))"""


def is_open(queue: str) -> str:
    """Return the condition that the queue named by the SQL text `queue` may be claimed from.

    A paused queue is closed. A queue that backs off, or that limits its messages in flight, is
    open to a caller that was `admitted`: it holds the gate.
    """
    return f"""not exists (
                select from django_mq_queuestate s
                 where s.queue = {queue}
                   and ({IS_PAUSED}
                        or not %(admitted)s
                        and (s.backoff_level > 0 or s.max_in_flight is not null)))"""


# The whole fleet makes one claim at a time from such a queue, so the count that follows is still
# true when the claim commits. A separate statement takes the lock, so that the snapshot of the next
# one is newer than the lock. It does not wait: a worker frozen in its claim would stop all others,
# and their other queues.
ENTER = f"select pg_try_advisory_xact_lock(hashtextextended(%(queue)s, {GATE}))"

# A lease ends after its claim, and claims come one at a time. So no later count has to begin before
# the first lease that this one found or, if it found none, before its own time.
READ = """
select coalesce(s.backoff_level, 0), allowed.max_in_flight, leased.count,
       case when allowed.max_in_flight > 0
            then date_part('epoch', least(leased.first, statement_timestamp())) end
  from (select) one
  left join django_mq_queuestate s on s.queue = %(queue)s
 cross join lateral (select coalesce(s.max_in_flight, %(limit)s::int) as max_in_flight) allowed
  left join lateral (
    select count(*), min(leased.leased_until) as first
      from (
        select m.leased_until
          from django_mq_queuedmessage m
         where m.queue = %(queue)s and m.leased_until >= to_timestamp(%(lease_mark)s)
         order by m.leased_until
         limit allowed.max_in_flight
      ) leased
  ) leased on allowed.max_in_flight is not null
"""


class Gate(NamedTuple):
    """A queue's backoff level, its limit of messages in flight (None: none), and their number.

    `lease_mark` is where the next count can begin, None if nothing was counted.
    """

    level: int
    max_in_flight: int | None
    in_flight: int | None
    lease_mark: float | None

    @property
    def room(self) -> int | None:
        """The number of messages that may still be claimed, None for any number."""
        return (
            None
            if self.max_in_flight is None
            else max(0, self.max_in_flight - (self.in_flight or 0))
        )


def enter(
    cursor: Cursor, *, queue: str, limit: int | None, lease_mark: float = float("-inf")
) -> Gate | None:
    """Take the gate of `queue` until the commit and return it; None while another session has it.

    `limit` comes from the settings; a limit that an operator has set takes precedence. The count
    leaves out leases that end before `lease_mark`, in seconds since 1970.
    """
    cursor.execute(ENTER, {"queue": queue})
    if not cursor.fetchone()[0]:
        return None
    gate = _read(cursor, queue, limit, lease_mark)
    if gate.lease_mark is not None and gate.lease_mark < lease_mark:
        # The server's clock was set back, and leases end before the mark.
        gate = _read(cursor, queue, limit, float("-inf"))
    return gate


def _read(cursor: Cursor, queue: str, limit: int | None, lease_mark: float) -> Gate:
    cursor.execute(READ, {"queue": queue, "limit": limit, "lease_mark": lease_mark})
    return Gate._make(cursor.fetchone())
