"""The sessions of a worker, and how to end those that froze with a message of an ordered queue.

A session is named by its process id and its start time, since the server reuses the process ids of
sessions that have ended.
"""

from __future__ import annotations

from django_mq.store import Cursor, literals
from django_mq.store.limits import Limits, begin

_NAME = "(a.pid || ' ' || extract(epoch from a.backend_start))"

# Sessions that ended are dropped. The statement does not wait for a lock on the heartbeat's row.
RECORD = f"""
{begin(Limits(lock=0.2))};
update django_mq_workerheartbeat w
   set sessions = (
       select coalesce(jsonb_agg({_NAME}), '[]')
         from pg_stat_activity a
        where a.pid = pg_backend_pid() or w.sessions ? {_NAME})
 where w.id = any(array(
    select w.id from django_mq_workerheartbeat w where w.id = %(worker)s
       for no key update skip locked))
returning w.id;
commit
"""


def record(worker: str) -> str:
    """Return the query that adds the session that runs it to the heartbeat of `worker`.

    The query returns a row if the heartbeat was there and not locked.
    """
    return RECORD % literals({"worker": worker})


# Only the holder of the row's lock has xmax for its transaction id, unless several sessions have
# the row locked: then xmax is the id of their group, which counts from another sequence and may
# equal the transaction id of any session, in any database. So the session must also be one that the
# worker recorded. Where a login may not see when a session began, it may not end it either.
END = f"""
select m.id, pg_terminate_backend(a.pid)
  from django_mq_queuedmessage m
  join pg_locks holder
    on holder.locktype = 'transactionid' and holder.transactionid = m.xmax and holder.granted
  join pg_stat_activity a on a.pid = holder.pid and a.datname = current_database()
  join django_mq_workerheartbeat w on w.id = %(worker)s
   and (w.sessions ? {_NAME}
        or a.backend_start is null and w.sessions::text ~ ('"' || a.pid || ' '))
 where m.queue = %(queue)s and m.leased_until <= statement_timestamp()
   and w.last_seen <= statement_timestamp() - make_interval(secs => %(silent)s)
   and starts_with(m.claimed_by, %(prefix)s)
"""


def end(cursor: Cursor, *, queue: str, worker: str, silent: float) -> list[int]:
    """End the sessions of `worker` that have locked its own lapsed messages of `queue`.

    Ends none unless the last heartbeat of `worker` is `silent` seconds old: a process that lives
    also loses its queue if a lock or a signal receiver holds up its loop. The transactions are
    rolled back. Returns the ids of the messages. Raises the server's error if this login may not
    end them.
    """
    cursor.execute(
        END, {"queue": queue, "worker": worker, "silent": silent, "prefix": f"{worker}:"}
    )
    return [row[0] for row in cursor.fetchall()]
