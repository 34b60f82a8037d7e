"""Lock a claimed message and settle it: ack, retry, dead-letter, snooze, hold or release.

Every statement names the fence (id, attempt and claimer), so it changes nothing that has become
somebody else's, and returns the ids it did change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from django_mq.messages import Fence, PlainFence
from django_mq.store import LOCKED, OURS, array, fence_columns, fence_runs, fenced, literal

if TYPE_CHECKING:
    from django_mq.store import Cursor


class Locked(NamedTuple):
    """What a transaction locked. `missing` are not ours any more, or locked by somebody else.

    `expired` are locked, but no attempt may start; `xid` names the transaction, if it has one.
    """

    missing: set[int]
    expired: set[int]
    xid: str | None


# In the lock, since that is the first statement of a slice: no round trip of their own.
SET = """(select count(set_config(name, value, true))
          from unnest(%(names)s::text[], %(values)s::text[]) as setting (name, value))"""

LOCK = f"""
with locked as materialized (
    select id, expires_at <= statement_timestamp() as expired
      from django_mq_queuedmessage
     where {OURS}
       for no key update skip locked
)
select count(*),
       case when count(*) < cardinality(%(ids)s::bigint[]) then array_agg(id) end,
       array_agg(id) filter (where expired),
       pg_current_xact_id()::text,
       {SET}
  from locked
"""  # noqa: S608  (made of our own texts, as are those below)


# One alone, in half the time that the server takes to plan the other.
LOCK_ONE = f"""
select m.expires_at <= statement_timestamp(), pg_current_xact_id()::text,
       {SET}
  from django_mq_queuedmessage m
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
   for no key update of m skip locked
"""  # noqa: S608


# Somebody has run for long by now: a renewal has the row for a moment, and is waited for.
LOCK_ONE_PATIENTLY = LOCK_ONE.replace(" skip locked", "")

_PLACES = {"id": "$1", "attempt": "$2", "claimer": "$3", "names": "$4", "values": "$5"}
PREPARE_LOCK_ONE = f"""
prepare django_mq_lock_one (bigint, int, text, text, text) as {LOCK_ONE % _PLACES};
prepare django_mq_lock_one_patiently (bigint, int, text, text, text) as
{LOCK_ONE_PATIENTLY % _PLACES}
"""
# The settings hold while it is planned: a plan that was made while the table is empty must serve
# when it is large. The handlers' statements have those of their session.
BEGIN_AND_LOCK_ONE = """
begin;
set local enable_seqscan = off; set local plan_cache_mode = force_generic_plan;
execute django_mq_lock_one (%(id)s, %(attempt)s, %(claimer)s, %(names)s, %(values)s);
set local enable_seqscan to default; set local plan_cache_mode to default
"""
#: Seconds that a renewal, which takes a moment, is waited for. Who has a row for longer, say an
#: operator, may have it for an hour. Less than the server's deadlock_timeout of a second: should he
#: wait for us just then, we give up, and he goes on.
PATIENCE = 0.5
BEGIN_AND_LOCK_ONE_PATIENTLY = (
    BEGIN_AND_LOCK_ONE.replace("lock_one", "lock_one_patiently").replace(
        "begin;", f"begin; set local lock_timeout = '{PATIENCE}s';"
    )
    + "; set local lock_timeout to default"
)

PATIENTLY = f"set local lock_timeout = '{PATIENCE}s'; select pg_current_xact_id()::text"


def begin_patiently(settings: Mapping[str, str]) -> str:
    """Return what begins to settle rows that were not locked before; `settings` are whole numbers.

    >>> begin_patiently({"client_connection_check_interval": "500"}).split("; ")[:2]
    ['begin', 'set local client_connection_check_interval = 500']
    """
    steps = [f"set local {name} = {int(value)}; " for name, value in settings.items()]
    return f"begin; {''.join(steps)}{PATIENTLY}"


def begin_and_lock_one(
    fence: PlainFence, settings: Mapping[str, str], *, patiently: bool = False
) -> str:
    """Return BEGIN_AND_LOCK_ONE with its parameters.

    The driver would take as long to write them as the server to run it.
    """
    params = _lock_one_params(fence, settings)
    text = BEGIN_AND_LOCK_ONE_PATIENTLY if patiently else BEGIN_AND_LOCK_ONE
    return text % {name: literal(value) for name, value in params.items()}


def _lock_one_params(fence: PlainFence, settings: Mapping[str, str]) -> dict[str, object]:
    return {**_one(fence), **_settings(settings)}


def _settings(settings: Mapping[str, str]) -> dict[str, object]:
    return {"names": array(settings), "values": array(settings.values())}


def lock(cursor: Cursor, fences: Sequence[PlainFence], settings: Mapping[str, str]) -> Locked:
    """Lock the rows of `fences` that are still ours and not locked by anybody.

    `settings` of the server hold from here to the end of the transaction.
    """
    if len(fences) == 1:
        cursor.execute(LOCK_ONE, _lock_one_params(fences[0], settings))
        found = cursor.fetchone()
        if found is None:
            return Locked({fences[0][0]}, set(), None)
        return Locked(set(), {fences[0][0]} if found[0] else set(), found[1])
    cursor.execute(LOCK, {**fence_runs(fences), **_settings(settings)})
    count, locked, expired, xid, _ = cursor.fetchone()
    missing: set[int] = set()
    if count < len(fences):
        missing = {fence[0] for fence in fences}.difference(locked or ())
    return Locked(missing, set(expired or ()), xid)


STILL_OURS = f"""
select m.id
  from {fenced()}
"""  # noqa: S608


def still_ours(cursor: Cursor, fences: Sequence[Fence]) -> set[int]:
    """Return the ids of `fences` that nobody took, whether or not somebody has locked them."""
    cursor.execute(STILL_OURS, fence_columns(fences))
    return _ids(cursor)


ACK = f"""
delete from django_mq_queuedmessage
 where {OURS}
returning id
"""  # noqa: S608


ACK_ONE = """
delete from django_mq_queuedmessage m
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
"""


def ack(cursor: Cursor, fences: Sequence[PlainFence]) -> set[int]:
    """Remove the messages of `fences`: their handlers are done. Return the ids removed."""
    if len(fences) == 1:
        cursor.execute(ACK_ONE, _one(fences[0]))
        return {fences[0][0]} if cursor.rowcount else set()
    cursor.execute(ACK, fence_runs(fences))
    if cursor.rowcount == len(fences):
        return {fence[0] for fence in fences}  # without reading what the server says of each
    return _ids(cursor)


class Failed(NamedTuple):
    """One failed attempt and what becomes of its message.

    It runs again at `at`, else `delay` seconds from now; with a `dead_reason` it is dead.
    `seconds` is how long the attempt ran.
    """

    fence: Fence
    at: datetime | None
    delay: float
    dead_reason: str
    error_class: str
    error_text: str
    traceback: str
    last_error: str
    seconds: float
    suspect: bool = False


FAIL = """
with failed as materialized (
    select *
      from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[],
                  %(ats)s::timestamptz[], %(delays)s::float8[], %(dead_reasons)s::text[],
                  %(error_classes)s::text[], %(error_texts)s::text[], %(tracebacks)s::text[],
                  %(last_errors)s::text[], %(seconds)s::float8[], %(suspects)s::bool[])
           as failed (id, attempt, claimer, at, delay, dead_reason,
                      error_class, error_text, traceback, last_error, seconds, suspect)
), changed as (
    update django_mq_queuedmessage m
       set leased_until = null, claimed_by = null, held_since = null,
           suspect = failed.suspect,
           processable_after = greatest(
               least(coalesce(failed.at,
                              statement_timestamp() + make_interval(secs => failed.delay)),
                     statement_timestamp() + interval '366 days'),
               statement_timestamp()),
           last_error = failed.last_error,
           dead_at = case when failed.dead_reason <> '' then statement_timestamp() end,
           dead_reason = failed.dead_reason
      from failed
     where m.id = any(%(ids)s::bigint[])
       and m.id = failed.id and m.attempts = failed.attempt and m.claimed_by = failed.claimer
    returning m.id, m.queue, m.type, m.handler
)
insert into django_mq_failedattempt
       (message_id, queue, type, handler, attempt, worker, started_at, ended_at,
        error_class, error_text, traceback)
select changed.id, changed.queue, changed.type, changed.handler, failed.attempt,
       split_part(failed.claimer, ':', 1),
       statement_timestamp() - make_interval(secs => failed.seconds), statement_timestamp(),
       failed.error_class, failed.error_text, failed.traceback
  from changed
  join failed using (id)
returning message_id
"""


def fail(cursor: Cursor, failures: Sequence[Failed]) -> set[int]:
    """Retry or dead-letter messages and write down their failed attempts; return the ids."""
    params = fence_columns([failure.fence for failure in failures])
    params["ats"] = [failure.at for failure in failures]
    params["delays"] = [failure.delay for failure in failures]
    params["dead_reasons"] = [failure.dead_reason for failure in failures]
    params["error_classes"] = [failure.error_class for failure in failures]
    params["error_texts"] = [failure.error_text for failure in failures]
    params["tracebacks"] = [failure.traceback for failure in failures]
    params["last_errors"] = [failure.last_error for failure in failures]
    params["seconds"] = [failure.seconds for failure in failures]
    params["suspects"] = [failure.suspect for failure in failures]
    cursor.execute(FAIL, params)
    return _ids(cursor)


SNOOZE = """
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null, held_since = null, suspect = false,
       attempts = m.attempts - 1,
       processable_after = greatest(
           least(coalesce(%(at)s::timestamptz,
                          statement_timestamp() + make_interval(secs => %(delay)s)),
                 statement_timestamp() + interval '366 days'),
           statement_timestamp() + interval '0.1 s')
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
returning m.id
"""


def snooze(cursor: Cursor, fence: Fence, *, at: datetime | None, delay: float) -> set[int]:
    """Have the message again at `at`, else in `delay` seconds; its attempt is refunded.

    Not before 0.1 s from now, since nothing else would end a handler that always snoozes.
    """
    cursor.execute(SNOOZE, {**_one(fence), "at": at, "delay": delay})
    return _ids(cursor)


HOLD = """
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null,
       attempts = m.attempts - 1,
       held_since = coalesce(m.held_since, statement_timestamp()),
       last_error = %(reason)s,
       processable_after = statement_timestamp() + make_interval(secs => %(delay)s)
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
returning m.id
"""


def hold(cursor: Cursor, fence: Fence, *, reason: str, delay: float) -> set[int]:
    """Set aside a message that cannot run here, for `delay` seconds; no attempt is used."""
    cursor.execute(HOLD, {**_one(fence), "reason": reason, "delay": delay})
    return _ids(cursor)


BURY = """
update django_mq_queuedmessage m
   set leased_until = null, claimed_by = null, suspect = false,
       attempts = m.attempts - 1,
       dead_at = statement_timestamp(), dead_reason = %(reason)s
 where m.id = %(id)s and m.attempts = %(attempt)s and m.claimed_by = %(claimer)s
returning m.id
"""


def bury(cursor: Cursor, fence: Fence, *, reason: str) -> set[int]:
    """Dead-letter a message that never started this attempt: expired, or held for too long."""
    cursor.execute(BURY, {**_one(fence), "reason": reason})
    return _ids(cursor)


# processable_after stays as it is: a released row keeps its place in line.
RELEASE = f"""
update django_mq_queuedmessage
   set leased_until = null, claimed_by = null, attempts = attempts - 1
 where id = any(array(
    select m.id
      from {fenced(last=LOCKED)}))
returning id
"""  # noqa: S608


def release(cursor: Cursor, fences: Sequence[Fence]) -> set[int]:
    """Give back messages that were not started: attempt refunded, place in line kept."""
    cursor.execute(RELEASE, fence_columns(fences))
    return _ids(cursor)


CURRENT = "select pg_current_xact_id()::text"


def current_transaction(cursor: Cursor) -> str:
    """Return the id of the transaction that is open: another one was begun since if it differs."""
    cursor.execute(CURRENT)
    xid: str = cursor.fetchone()[0]
    return xid


COMMITTED = "select pg_xact_status(%(xid)s::xid8)"


def transaction_status(cursor: Cursor, xid: str) -> str | None:
    """Return committed, aborted or in progress; None for a transaction too old to know."""
    cursor.execute(COMMITTED, {"xid": xid})
    status: str | None = cursor.fetchone()[0]
    return status


def _one(fence: PlainFence) -> dict[str, object]:
    return dict(zip(("id", "attempt", "claimer"), fence, strict=True))


def _ids(cursor: Cursor) -> set[int]:
    return {row[0] for row in cursor.fetchall()}
