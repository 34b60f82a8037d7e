"""Failed attempts grouped by fingerprint; the cost grows with the groups, not the attempts.

The index is on fingerprint, queue and end, so the groups are walked queue by queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.readers import prepare_to_read

#: The pairs of fingerprint and queue that one statement walks over.
MAX_PAIRS = 10_000
#: The attempts of a pair that are counted.
MAX_COUNTED = 100_000
#: The number of newest attempts whose messages are looked up: per pair, and (roughly) over all
#: pairs of a call. A message takes 15 us.
MAX_EXAMINED_PER_PAIR, MAX_EXAMINED = 1_000, 10_000


def failed_last_with(fingerprint: str) -> str:
    """Return the condition that the last failed attempt of message `m` has this fingerprint."""
    return f"""(
        select f.fingerprint
          from django_mq_failedattempt f
         where f.message_id = m.id
         order by f.attempt desc, f.id desc
         limit 1) = {fingerprint}"""


class PairRow(NamedTuple):
    """The failed attempts with one fingerprint in one queue; `attempt` is the newest."""

    fingerprint: str
    queue: str
    attempts: int
    first: float
    last: float
    attempt: int
    message: int
    error_class: str
    handler: str
    place: str


_OF_PAIR = """
          from django_mq_failedattempt f
         where f.fingerprint = pair.fingerprint and f.queue = pair.queue
           and f.ended_at >= %(since)s::timestamptz"""

GROUPS = f"""
with recursive pair as (
    (select f.fingerprint, f.queue, 1 as n
       from django_mq_failedattempt f
      where %(fingerprint)s::text is null or f.fingerprint = %(fingerprint)s
      order by f.fingerprint, f.queue
      limit 1)
     union all
    select next.fingerprint, next.queue, pair.n + 1
      from pair
     cross join lateral (
        select f.fingerprint, f.queue
          from django_mq_failedattempt f
         where (f.fingerprint, f.queue) > (pair.fingerprint, pair.queue)
           and (%(fingerprint)s::text is null or f.fingerprint = %(fingerprint)s)
         order by f.fingerprint, f.queue
         limit 1
     ) next
     where pair.n < {MAX_PAIRS}
), newest as (
    select pair.fingerprint, pair.queue, f.*
      from pair
     cross join lateral (
        select f.id, f.message_id, f.error_class, f.handler, f.place, f.ended_at{_OF_PAIR}
         order by f.ended_at desc
         limit 1
     ) f
     where %(queues)s::text[] is null or pair.queue = any(%(queues)s::text[])
), chosen as (
    select newest.fingerprint
      from newest
     group by newest.fingerprint
     order by max(newest.ended_at) desc, newest.fingerprint
     limit %(limit)s offset %(offset)s
)
select pair.fingerprint, pair.queue, counted.count,
       extract(epoch from oldest.ended_at)::float8, extract(epoch from pair.ended_at)::float8,
       pair.id, pair.message_id, pair.error_class, pair.handler, pair.place
  from newest pair
  join chosen on chosen.fingerprint = pair.fingerprint
 cross join lateral (
    select f.ended_at{_OF_PAIR}
     order by f.ended_at
     limit 1
 ) oldest
 cross join lateral (
    select count(*)
      from (select{_OF_PAIR}
             limit {MAX_COUNTED} + 1
      ) f
 ) counted
 order by pair.ended_at desc
"""


def groups(
    cursor: Cursor,
    *,
    since: datetime,
    queues: Sequence[str] | None,
    fingerprint: str | None,
    limit: int,
    offset: int = 0,
) -> list[PairRow]:
    """Return fingerprints with all their queues, most recent failure first.

    Skips `offset` fingerprints and returns at most `limit`. Counts only attempts that ended at
    `since` or later, and at most `MAX_COUNTED` + 1.
    """
    prepare_to_read(cursor)
    cursor.execute(
        GROUPS,
        {
            "since": since,
            "queues": None if queues is None else list(queues),
            "fingerprint": fingerprint,
            "limit": limit,
            "offset": offset,
        },
    )
    return [PairRow._make(row) for row in cursor.fetchall()]


REMAINING = f"""
select pair.fingerprint, count(*) filter (where m.dead_at is not null),
       count(*) filter (where m.dead_at is null and m.leased_until is null)
  from unnest(%(fingerprints)s::text[], %(queues)s::text[]) as pair (fingerprint, queue)
 cross join lateral (
    select distinct newest.message_id
      from (select f.message_id{_OF_PAIR}
             order by f.ended_at desc
             limit %(maximum)s
      ) newest
 ) f
 cross join lateral (
    select m.id, m.dead_at, m.leased_until
      from django_mq_queuedmessage m
     where m.id = f.message_id
    offset 0
 ) m
 where {failed_last_with("pair.fingerprint")}
 group by pair.fingerprint
"""


def attempts_per_pair(pairs: Sequence[PairRow]) -> int:
    """Return the number of newest attempts that are examined for each of the `pairs`."""
    return max(1, min(MAX_EXAMINED_PER_PAIR, MAX_EXAMINED // max(1, len(pairs))))


def remaining_messages(
    cursor: Cursor, pairs: Sequence[PairRow], *, since: datetime
) -> dict[str, tuple[int, int]]:
    """Return how many messages of each fingerprint are dead and how many wait.

    A message has the fingerprint of its last failed attempt. Only the newest `attempts_per_pair()`
    attempts of each pair are examined.
    """
    prepare_to_read(cursor)
    cursor.execute(
        REMAINING,
        {
            "since": since,
            "maximum": attempts_per_pair(pairs),
            "fingerprints": [pair.fingerprint for pair in pairs],
            "queues": [pair.queue for pair in pairs],
        },
    )
    return {fingerprint: (dead, waiting) for fingerprint, dead, waiting in cursor.fetchall()}
