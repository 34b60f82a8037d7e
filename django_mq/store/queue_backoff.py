"""The backoff level of a queue, and its probe: short, guarded statements.

A worker's loop must not wait, so statements skip the queue's row if another session has it locked;
callers read the result with `backoff_states()`. A change is timed after the row is locked, so that
a claim which began before it counts as older.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from django_mq.store import Cursor
from django_mq.store.gates import IS_PAUSED


class LevelChange(NamedTuple):
    """The old and new level of a queue; it claims nothing before `until`, None at level zero."""

    previous_level: int
    level: int
    until: datetime | None


RAISE_LEVEL = """
with ours as materialized (
    select s.queue
      from django_mq_queuestate s
     where s.queue = %(queue)s and s.backoff_level = 0
       and (s.backoff_changed_at is null or s.backoff_changed_at < %(claimed_at)s)
       for no key update skip locked
), raised as (
    update django_mq_queuestate s
       set backoff_level = 1, backoff_changed_at = clock_timestamp(),
           backoff_until = clock_timestamp() + make_interval(secs => %(wait)s),
           probe_by = null, probe_until = null
      from ours
     where s.queue = ours.queue
    returning s.backoff_until
), added as (
    insert into django_mq_queuestate (queue, backoff_level, backoff_changed_at, backoff_until)
    select %(queue)s, 1, clock_timestamp(),
           clock_timestamp() + make_interval(secs => %(wait)s)
     where not exists (select from django_mq_queuestate s where s.queue = %(queue)s)
        on conflict (queue) do nothing
    returning backoff_until
)
select 0, 1, backoff_until from raised
 union all
select 0, 1, backoff_until from added
"""


def raise_level(
    cursor: Cursor, *, queue: str, claimed_at: datetime, wait: float
) -> LevelChange | None:
    """Let `queue` back off for `wait` seconds, because a message claimed at `claimed_at` failed.

    Raises the level from 0 to 1. Changes nothing and returns None if the queue backs off already
    (then only its probe moves the level), or if the message was claimed before the last change of
    the level.
    """
    cursor.execute(RAISE_LEVEL, {"queue": queue, "claimed_at": claimed_at, "wait": wait})
    row = cursor.fetchone()
    return None if row is None else LevelChange._make(row)


END_PROBE = """
with ours as materialized (
    select s.queue, s.backoff_level as before,
           least(greatest(s.backoff_level + %(step)s, 0), %(top)s) as level
      from django_mq_queuestate s
     where s.queue = %(queue)s and s.backoff_level > 0 and s.probe_by = %(claimer)s
       for no key update skip locked
)
update django_mq_queuestate s
   set backoff_level = ours.level,
       backoff_changed_at = case when ours.level = ours.before then s.backoff_changed_at
                                 else clock_timestamp() end,
       backoff_until = clock_timestamp()
                       + make_interval(secs => (%(waits)s::float8[])[ours.level]),
       probe_by = null, probe_until = null
  from ours
 where s.queue = ours.queue
returning ours.before, s.backoff_level, s.backoff_until
"""


def end_probe(
    cursor: Cursor, *, queue: str, claimer: str, step: int, waits: Sequence[float]
) -> LevelChange | None:
    """Move the level of `queue` by `step` (-1, 0 or 1), because its probe by `claimer` ended.

    Above level zero a new wait begins, whatever the step. The top level is the last of `waits`.
    Changes nothing and returns None if `claimer` no longer has the probe.
    """
    cursor.execute(
        END_PROBE,
        {
            "queue": queue,
            "claimer": claimer,
            "step": step,
            "top": len(waits),
            "waits": list(waits),
        },
    )
    row = cursor.fetchone()
    return None if row is None else LevelChange._make(row)


START_PROBE = f"""
with ours as materialized (
    select s.queue
      from django_mq_queuestate s
     where s.queue = %(queue)s and s.backoff_level > 0
       and (s.backoff_until is null or s.backoff_until <= statement_timestamp())
       and (s.probe_until is null or s.probe_until <= statement_timestamp())
       and not {IS_PAUSED}
       for no key update skip locked
)
update django_mq_queuestate s
   set probe_by = %(claimer)s,
       probe_until = statement_timestamp() + make_interval(secs => %(lease)s)
  from ours
 where s.queue = ours.queue
returning s.queue
"""


def start_probe(cursor: Cursor, *, queue: str, claimer: str, lease: float) -> bool:
    """Let `claimer` alone claim one message of `queue`, for `lease` seconds; return whether it may.

    It may if the queue backs off, the wait is over, the queue is not paused and has no other probe.
    """
    cursor.execute(START_PROBE, {"queue": queue, "claimer": claimer, "lease": lease})
    return cursor.fetchone() is not None


CANCEL_PROBE = """
with ours as materialized (
    select s.queue
      from django_mq_queuestate s
     where s.queue = %(queue)s and s.probe_by = %(claimer)s
       for no key update skip locked
)
update django_mq_queuestate s
   set probe_by = null, probe_until = null
  from ours
 where s.queue = ours.queue
"""


def cancel_probe(cursor: Cursor, *, queue: str, claimer: str) -> None:
    """Give back the probe of `queue` that `claimer` has, when it claimed nothing or ran nothing."""
    cursor.execute(CANCEL_PROBE, {"queue": queue, "claimer": claimer})


# Only while its message is still claimed: an abandoned probe lapses.
RENEW_PROBE = """
with ours as materialized (
    select s.queue
      from django_mq_queuestate s
     where s.queue = %(queue)s and s.probe_by = %(claimer)s
       and exists (
           select from django_mq_queuedmessage m
            where m.queue = s.queue and m.leased_until is not null and m.claimed_by = s.probe_by)
       for no key update of s skip locked
)
update django_mq_queuestate s
   set probe_until = greatest(
           s.probe_until, statement_timestamp() + make_interval(secs => %(lease)s))
  from ours
 where s.queue = ours.queue
"""


def renew_probe(cursor: Cursor, *, queue: str, claimer: str, lease: float) -> None:
    """Extend the probe of `queue` by `claimer` to `lease` seconds from now; never shorten it."""
    cursor.execute(RENEW_PROBE, {"queue": queue, "claimer": claimer, "lease": lease})


DROP_PROBES = """
with theirs as materialized (
    select s.queue
      from django_mq_queuestate s
     where starts_with(s.probe_by, %(prefix)s) and s.probe_by <> all(%(excluded)s::text[])
       for no key update skip locked
)
update django_mq_queuestate s
   set probe_by = null, probe_until = null
  from theirs
 where s.queue = theirs.queue
returning s.queue
"""


def drop_probes_of(cursor: Cursor, *, worker: str, excluded: Collection[str] = ()) -> set[str]:
    """Give back every probe of worker process `worker`, except those of the claimers `excluded`.

    Returns their queues: each may start a new probe at once.
    """
    cursor.execute(DROP_PROBES, {"prefix": f"{worker}:", "excluded": list(excluded)})
    return {row[0] for row in cursor.fetchall()}


BACKOFF_STATES = """
select s.queue, s.backoff_level, s.backoff_changed_at, s.probe_by
  from django_mq_queuestate s
 where s.queue = any(%(queues)s::text[])
"""


class BackoffState(NamedTuple):
    """The level of a queue, when it last changed, and the claimer of its probe."""

    level: int = 0
    changed_at: datetime | None = None
    probe_by: str | None = None


def backoff_states(cursor: Cursor, queues: Collection[str]) -> dict[str, BackoffState]:
    """Return the states of `queues`; one without a row is left out, as it does not back off."""
    cursor.execute(BACKOFF_STATES, {"queues": list(queues)})
    return {row[0]: BackoffState._make(row[1:]) for row in cursor.fetchall()}


END_BACKOFF = """
with before as materialized (
    select s.queue, s.backoff_level as level
      from django_mq_queuestate s
     where s.queue = %(queue)s
       and (s.backoff_level > 0 or s.backoff_until > statement_timestamp())
       for no key update
)
update django_mq_queuestate s
   set backoff_level = 0, backoff_changed_at = clock_timestamp(), backoff_until = null,
       probe_by = null, probe_until = null
  from before
 where s.queue = before.queue
returning before.level
"""


def end_backoff(cursor: Cursor, *, queue: str) -> LevelChange | None:
    """Let `queue` run at full rate again, whatever its level; None if it did not back off.

    Waits for the row's lock, because an operator asked.
    """
    cursor.execute(END_BACKOFF, {"queue": queue})
    row = cursor.fetchone()
    return None if row is None else LevelChange(row[0], 0, None)
