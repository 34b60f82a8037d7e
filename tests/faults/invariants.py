"""The invariants, in SQL: each statement returns a line for every message that breaks it.

`ALWAYS` holds at any moment without an open transaction; `AT_REST` when no worker is running;
`FINALLY` once all is done. The tolerances are those of docs/guarantees.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# The existing messages, the outcome of each, and the number of its runs.
FACTS = """
with queued as (
    select payload ->> 'name' as name, id, attempts, dead_at, dead_reason, last_error,
           leased_until, processable_after, blocked_by
      from django_mq_queuedmessage
     where starts_with(type, 'faults.')
), effects as (
    select name, count(*) as effects, max(attempt) as last_effect, min(id) as effect_id
      from faults_effect
     group by name
), runs as (
    select name,
           count(*) filter (where event = 'start') as starts,
           count(distinct attempt) filter (where event = 'start') as started,
           max(attempt) filter (where event = 'start') as last_start,
           count(*) filter (where event = 'return') as returns
      from faults_trace
     group by name
), facts as (
    select s.*, q.name is not null as waiting, q.dead_at, q.dead_reason, q.last_error,
           coalesce(q.attempts, 0) as attempts,
           coalesce(e.effects, 0) as effects, e.last_effect, e.effect_id,
           coalesce(r.starts, 0) as starts, coalesce(r.started, 0) as started, r.last_start,
           coalesce(r.returns, 0) as returns
      from faults_sent s
      left join queued q using (name)
      left join effects e using (name)
      left join runs r using (name)
)
"""

ALWAYS = {
    "lost: removed without what was promised": """
        select name from facts
         where not waiting and case when promise = 'run' then returns else effects end = 0
    """,
    "invented: nobody sent it": """
        select name from queued where name not in (select name from faults_sent)
        union all
        select name from faults_effect where name not in (select name from faults_sent)
        union all
        select name from faults_trace where name not in (select name from faults_sent)
    """,
    "one effect per message": """
        select format('%s: %s effects', name, effects) from facts
         where promise = 'once' and effects > 1
    """,
    "one row per message": """
        select format('%s: %s rows', name, count(*)) from queued group by name having count(*) > 1
    """,
    "effect and removal agree": """
        select name || ' had its effect and is still there' from facts
         where promise = 'once' and waiting and effects > 0
    """,
    "fence: no effect of an attempt that was superseded": """
        select format('%s: effect of attempt %s, while attempt %s had started',
                      name, last_effect, last_start)
          from facts where promise = 'once' and last_effect < last_start
    """,
    # A message that has been taken over need not have started again to be somebody else's.
    "fence: the attempt that had the effect is the one that was removed": """
        select format('%s: effect of attempt %s, removed as attempt %s',
                      name, last_effect, r.attempt)
          from facts join faults_removed r using (name)
         where promise = 'once' and last_effect <> r.attempt
    """,
    "order of a line: nothing starts before its predecessor is done": """
        select format('%s started while the last of %s was: %s',
                      b.name, a.name, coalesce(t.event, '-'))
          from faults_trace start
          join faults_sent b on b.name = start.name
          join faults_sent a on a.line = b.line and a.id < b.id
          left join lateral (
               select event from faults_trace t
                where t.name = a.name and t.id < start.id order by t.id desc limit 1) t on true
         where start.event = 'start' and t.event is distinct from 'return'
    """,
    "order of a line: effects come in order": """
        select format('%s before %s', b.name, a.name)
          from facts a join facts b on a.line = b.line and a.id < b.id
         where b.effect_id < coalesce(a.effect_id, b.effect_id + 1)
    """,
    # If a whole host is lost, the first message of a line is charged for those behind it: nobody
    # knows which of them ran in the same slice.
    "an attempt is charged before it starts: none runs again for free after a crash": """
        select format('%s: attempt %s started again after its process died', c.name, c.attempt)
          from faults_trace c
          join faults_sent s using (name)
         where c.event = 'start' and (s.line is null or %(spare)s = 0)
           and not exists (
               select from faults_trace e
                where e.name = c.name and e.pid = c.pid and e.id > c.id and e.event <> 'start')
           and exists (
               select from faults_trace l
                where l.name = c.name and l.id > c.id and l.event = 'start'
                  and l.attempt <= c.attempt)
    """,
    "not before it is due": "select name from facts where waits and starts > 0",
    "a reply for each end, and none before": """
        select name from facts
         where request is not null
           and waiting = exists (select from django_mq_result r where r.message_id = request)
    """,
}

#: Holds once a worker has left and no other is running.
AT_REST = {
    "released: nothing is held by a worker that has left": """
        select format('%s is held', name) from queued where leased_until is not null
    """,
    "refunded: what did not start is as it was": """
        select format('%s: attempt %s, of which %s started', name, attempts, started)
          from facts where waiting and attempts > started
    """,
}

FINALLY = {
    "done: nothing is left": """
        select format('%s is still there, after attempt %s %s', name, attempts, last_error)
          from facts where waiting and not waits and dead_at is null
    """,
    "nothing dies that could be handled": """
        select format('%s is dead: %s, %s', name, dead_reason, last_error)
          from facts where dead_at is not null
    """,
    # A process may be killed between its mark for a message and the handler's first line.
    "attempts equal starts: none charged that did not start": """
        select format('%s: attempt %s, of which %s started', name, attempt, started)
          from (select *, count(*) over () as charged
                  from (select *, greatest(last_start, last_effect, attempts) as attempt
                          from facts) f
                 where not waits and attempt > started + %(spare)s) g
         where charged > %(marked)s or attempt > started + %(spare)s + %(begun)s
    """,
    "the reply is the handler's": """
        select name from facts join django_mq_result r on r.message_id = request
         where r.value <> to_jsonb(name) or r.error_class <> ''
    """,
}

#: A process that stood still for longer than its lease may start a message that is another's by
#: now; then only the fence counts.
WITHOUT_FREEZE = {
    "attempts never go back": """
        select format('%s: attempt %s after %s', name, attempt, before)
          from (select name, attempt,
                       max(attempt) over (partition by name order by id) as before
                  from faults_trace where event = 'start') t
         where attempt < before
    """,
}

WITHOUT_FAULT = {
    "attempts equal starts: each runs once, and once more for each failure": """
        select format('%s: %s starts', name, starts) from facts
         where not waits and starts <> fails + 1
    """,
}

IN_ORDER = {
    "in order: the first starts come as sent": """
        select format('%s before %s', name, before)
          from (select s.name, s.id, lag(s.name) over (order by t.id) as before,
                       max(s.id) over (order by t.id) as latest
                  from (select name, min(id) as id from faults_trace group by name) t
                  join faults_sent s using (name)) x
         where id < latest
    """,
}

LOAD = "copy faults_trace (id, event, name, attempt, pid) from stdin"


def load(cursor: Any, events: Iterable[tuple[str, str, int, int]]) -> None:
    """Load the trace into its table, replacing the content."""
    cursor.execute("truncate faults_trace")
    with cursor.copy(LOAD) as copy:
        for number, event in enumerate(events):
            copy.write_row((number, *event))


def broken(
    cursor: Any, checks: dict[str, str], *, spare: int = 0, begun: int = 0, in_call: int = 1
) -> list[str]:
    """Return the violations, a line per message.

    `spare` is how many attempts a message may be charged that it did not start: one for the loss of
    a whole host, which no supervisor reports. `begun` is how many processes were killed at a moment
    that no handler chose: each may have marked the messages of one call, up to `in_call`, without
    starting it.
    """
    parts = [
        f"select {_quoted(name)} || ': ' || found::text from ({_escaped(sql)}) x (found)"
        for name, sql in checks.items()
    ]
    given = {"spare": spare, "begun": begun, "marked": begun * in_call}
    cursor.execute(_escaped(FACTS) + "\nunion all\n".join(parts), given)
    return [line for (line,) in cursor.fetchall()]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _escaped(sql: str) -> str:
    """Double the % of format(), and leave the parameters alone."""
    return re.sub(r"%(?!\()", "%%", sql)
