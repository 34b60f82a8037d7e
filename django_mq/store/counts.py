"""Counts of queues, usable with millions of rows.

Loose index scans find the priorities; every count stops at a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.states import GONE_AFTER
from django_mq.store import Cursor
from django_mq.store.conditions import WAITS
from django_mq.store.gates import IS_PAUSED
from django_mq.store.queue_names import LANES

# The messages of `named` that wait, due before (<=) or after (>) now.
_WAITING = f"""select count(*) as n,
           count(*) filter (where m.held_since is not null) as held,
           count(*) filter (where m.held_since is null
                              and m.expires_at <= statement_timestamp()) as expired,
           count(*) filter (where m.held_since is null
                              and (m.expires_at <= statement_timestamp()) is not true
                              and m.attempts > 0) as retrying
      from (
        select found.*
          from unnest(named.priorities) as lane (priority)
         cross join lateral (
            select m.held_since, m.expires_at, m.attempts
              from django_mq_queuedmessage m
             where m.queue = named.queue and m.priority = lane.priority
               and {WAITS}
               and m.processable_after {{when}} statement_timestamp()
             order by m.processable_after
             limit %(limit)s
         ) found
         limit %(limit)s
      ) m"""

# Every subquery stops at the limit and reads in the order of its index, so that no plan scans the
# table. No index finds blocked rows by queue, so the scan covers the keyed rows. Each queue carries
# its priorities in an array: looking them up in `lane` for each queue would be quadratic.
COUNTS = f"""
with recursive {LANES}, named (queue, priorities) as materialized (
    select asked.queue, lanes.priorities
      from unnest(%(queues)s::text[]) as asked (queue)
      left join (
        select lane.queue, array_agg(lane.priority order by lane.priority desc) as priorities
          from lane
         group by lane.queue
     ) lanes on lanes.queue = asked.queue
), running (message) as materialized (
    select jsonb_path_query(w.running, '$[*]')
      from django_mq_workerheartbeat w
     where w.last_seen > statement_timestamp() - make_interval(secs => %(gone_after)s)
)
select named.queue,
       due.n, due.held, due.expired,
       later.n, later.held, later.expired, later.retrying,
       leased.n, leased.running, leased.lapsed, leased.held, leased.expired,
       keyed.n, keyed.blocked, keyed.key, coalesce(head.id, first.id),
       coalesce(keyed.dead_head, case when first.dead then first.id end),
       dead.n,
       date_part('epoch', statement_timestamp() - oldest.at),
       {IS_PAUSED},
       case when s.paused_until > statement_timestamp() then s.paused_until end,
       coalesce(s.backoff_level, 0),
       case when s.backoff_until > statement_timestamp() then s.backoff_until end,
       case when s.probe_until > statement_timestamp() then s.probe_by end,
       s.max_in_flight,
       case when s.owned_until > statement_timestamp() then s.owner end,
       case when s.owned_until > statement_timestamp() then s.owned_until end
  from named
 cross join lateral (
    {_WAITING.format(when="<=")}
 ) due
 cross join lateral (
    {_WAITING.format(when=">")}
 ) later
 cross join lateral (
    select count(*) as n,
           count(*) filter (where m.runs) as running,
           count(*) filter (where m.lapsed and not m.runs) as lapsed,
           count(*) filter (where m.lapsed and not m.runs and m.held_since is not null) as held,
           count(*) filter (where m.lapsed and not m.runs and m.held_since is null
                              and m.expires_at <= statement_timestamp()) as expired
      from (
        select m.held_since, m.expires_at,
               m.leased_until <= statement_timestamp() as lapsed,
               to_jsonb(m.id) in (select running.message from running) as runs
          from django_mq_queuedmessage m
         where m.queue = named.queue and m.leased_until is not null
         order by m.leased_until
         limit %(limit)s
      ) m
 ) leased
 cross join lateral (
    select coalesce(sum(line.n), 0)::bigint as n,
           coalesce(sum(line.blocked), 0)::bigint as blocked,
           (array_agg(line.handler order by line.parked) filter (where line.blocked > 0))[1]
               as handler,
           (array_agg(line.key order by line.parked) filter (where line.blocked > 0))[1] as key,
           min(line.first) filter (
               where line.blocked > 0 and line.first = line.dead
                 and named.queue <> all(%(skipping)s::text[])) as dead_head
      from (
        select m.handler, m.key, count(*) as n, count(*) filter (where m.waits) as blocked,
               min(m.id) as first, min(m.id) filter (where m.waits) as parked,
               min(m.id) filter (where m.dead_at is not null) as dead
          from (
            select m.id, m.handler, m.key, m.dead_at,
                   m.blocked_by is not null and m.leased_until is null
                   and m.dead_at is null as waits
              from django_mq_queuedmessage m
             where m.queue = named.queue and m.key is not null
             order by m.handler, m.key, m.id
             limit %(limit)s
          ) m
         group by m.handler, m.key
      ) line
 ) keyed
  left join lateral (
    select m.id
      from django_mq_queuedmessage m
     where m.queue = named.queue and m.handler = keyed.handler
       and m.key >= keyed.key and m.key <= keyed.key
       and (m.dead_at is null or named.queue <> all(%(skipping)s::text[]))
     order by m.key, m.id
     limit 1
 ) head on true
  left join lateral (
    select m.id, m.dead_at is not null as dead,
           m.leased_until is null
           and (m.dead_at is not null or m.processable_after > statement_timestamp()) as waits
      from django_mq_queuedmessage m
     where m.queue >= named.queue and m.queue <= named.queue and m.ordered
       and named.queue = any(%(ordered)s::text[])
       and (m.dead_at is null or named.queue <> all(%(skipping)s::text[]))
     order by m.queue, m.id
     limit 1
 ) first on first.waits
 cross join lateral (
    select count(*) as n
      from (
        select
          from django_mq_queuedmessage m
         where m.queue = named.queue and m.dead_at is not null
         order by m.dead_at
         limit %(limit)s
      ) m
 ) dead
 cross join lateral (
    select min(first.at) as at
      from unnest(named.priorities) as lane (priority)
     cross join lateral (
        select old.at
          from (
            select m.processable_after as at, m.held_since, m.expires_at
              from django_mq_queuedmessage m
             where m.queue = named.queue and m.priority = lane.priority
               and {WAITS}
               and m.processable_after <= statement_timestamp()
             order by m.processable_after
             limit %(limit)s
         ) old
         where old.held_since is null
           and (old.expires_at is null or old.expires_at > statement_timestamp())
         order by old.at
         limit 1
     ) first
 ) oldest
  left join django_mq_queuestate s on s.queue = named.queue
"""


class Census(NamedTuple):
    """One queue, counted.

    - due: all, held, expired
    - later: all, held, expired, retrying
    - leased: all, running, lapsed; of the lapsed: held, expired
    - keyed: all, blocked

    `blocked_key` is the key of the oldest blocked message among those counted. `head` is the first
    message of that key, or of an ordered queue whose first message is dead, delayed or retrying.
    `dead_head` is the oldest dead head of any key.
    """

    queue: str
    due: tuple[int, int, int]
    later: tuple[int, int, int, int]
    leased: tuple[int, int, int, int, int]
    keyed: tuple[int, int]
    blocked_key: str | None
    head: int | None
    dead_head: int | None
    dead: int
    oldest_seconds: float | None
    paused: bool
    paused_until: datetime | None
    backoff_level: int
    backoff_until: datetime | None
    probe_by: str | None
    max_in_flight: int | None
    owner: str | None
    owned_until: datetime | None


def counts(
    cursor: Cursor,
    *,
    queues: Iterable[str],
    ordered: Sequence[str],
    skipping: Sequence[str],
    limit: int,
) -> list[Census]:
    """Count the messages of `queues`, each kind up to `limit`.

    `ordered` names the ordered queues among them, `skipping` the queues in which a dead head blocks
    nothing. A worker that is gone counts as running nothing. Call it in a transaction after
    `prepare_to_read()`.
    """
    cursor.execute(
        COUNTS,
        {
            "queues": list(queues),
            "ordered": list(ordered),
            "skipping": list(skipping),
            "limit": limit,
            "gone_after": GONE_AFTER.total_seconds(),
        },
    )
    return [
        Census(row[0], row[1:4], row[4:8], row[8:13], row[13:15], *row[15:])
        for row in cursor.fetchall()
    ]
