"""Commands to workers: about a running message, or to the worker itself (quiet, resume, leave)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django_mq.states import GONE_AFTER
from django_mq.store import Cursor, notify

# Workers read commands on each heartbeat, and at once when they are notified. Each new command also
# removes old ones, so the table needs no chore.
_PRUNE_OLD = """
    delete from django_mq_workercommand
     where asked_at < statement_timestamp() - interval '1 hour'
"""
#: The channel on which workers hear of commands.
CHANNEL = "django_mq_commands"
RING = f"select pg_notify('{CHANNEL}', '') where {notify.HAS_ROOM}"


def _store(cursor: Cursor, statement: str, **values: object) -> list[Any]:
    """Run a statement that stores commands, and ring the workers at the commit; return its ids.

    A worker that has been silent for `GONE_AFTER` does not count as alive.
    """
    cursor.execute(statement, {**values, "gone_after": GONE_AFTER.total_seconds()})
    found = [row[0] for row in cursor.fetchall()]
    if found and notify.is_enabled():
        cursor.execute(RING)
    return found


ASK = f"""
with old as ({_PRUNE_OLD}), asked as (
    insert into django_mq_workercommand (worker, message_id, attempt, action, asked_by)
    select w.id, m.id, m.attempts, %(action)s, %(by)s
      from django_mq_queuedmessage m
      join django_mq_workerheartbeat w on w.id = split_part(m.claimed_by, ':', 1)
     where m.id = any(%(ids)s::bigint[]) and m.leased_until is not null
       and w.last_seen > statement_timestamp() - make_interval(secs => %(gone_after)s)
    returning message_id
)
select message_id from asked
"""


def ask(cursor: Cursor, *, ids: Sequence[int], action: str, by: str) -> list[int]:
    """Ask the live workers that claimed `ids` for `action`; return the ids that they have."""
    return _store(cursor, ASK, ids=list(ids), action=action, by=by)


ORDER = f"""
with old as ({_PRUNE_OLD}), asked as (
    insert into django_mq_workercommand (worker, action, asked_by)
    select w.id, %(action)s, %(by)s
      from django_mq_workerheartbeat w
     where w.id = any(%(workers)s::text[])
       and w.last_seen > statement_timestamp() - make_interval(secs => %(gone_after)s)
    returning worker
)
select worker from asked order by worker
"""


def order(cursor: Cursor, *, workers: Sequence[str], action: str, by: str) -> list[str]:
    """Order the live workers among `workers` to do `action`; return their ids."""
    return _store(cursor, ORDER, workers=list(workers), action=action, by=by)


ANSWER = """
update django_mq_workercommand c
   set answered_at = statement_timestamp(), answer = answers.answer
  from unnest(%(ids)s::bigint[], %(answers)s::text[]) as answers (id, answer)
 where c.id = answers.id
"""


def answer(cursor: Cursor, answers: Mapping[int, str]) -> None:
    """Store a worker's `answers`, by the id of the command."""
    cursor.execute(ANSWER, {"ids": list(answers), "answers": list(answers.values())})
