"""Lists the peers, and the facts about their tables that the measurements need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One peer: its name in versions.toml, how the table calls it, its driver, its SQL.

    `tables` are emptied before each measurement. In `table`, `due` is true of the jobs that are
    due and not done. `delayed` and `failed` store rows that must not be in the way; they are given
    `count` and `payload`; a peer of TASK_BACKENDS alone needs none. `id` is its column of ids. A
    slow peer gets fewer jobs to drain.
    """

    name: str
    title: str
    driver: str
    tables: str
    table: str
    due: str
    delayed: str = ""
    failed: str = ""
    id: str = "id"
    slow: bool = False


#: Rows are written past procrastinate's triggers, which say NOTIFY and log an event for each.
PAST_TRIGGERS = """
alter table procrastinate_jobs disable trigger user;
{};
alter table procrastinate_jobs enable trigger user
"""
PROCRASTINATE = """
insert into procrastinate_jobs (queue_name, task_name, args, status, attempts, scheduled_at)
select 'default', 'noop', %(payload)s::jsonb, {} from generate_series(1, %(count)s)
"""
PROCRASTINATE_DUE = "status in ('todo', 'doing') and coalesce(scheduled_at <= now(), true)"

PGQUEUER = """
insert into pgqueuer (priority, entrypoint, payload, status, execute_after)
select 0, 'noop', convert_to(%(payload)s, 'utf8'), {} from generate_series(1, %(count)s)
"""
PGQUEUER_DUE = "status in ('queued', 'picked') and execute_after <= now()"

TASKS_DB = """
insert into django_tasks_database_dbtaskresult
       (id, args_kwargs, priority, task_path, queue_name, backend_name, exception_class_path,
        traceback, worker_ids, enqueued_at, status, started_at, finished_at, run_after)
select gen_random_uuid(), jsonb_build_object('args', '[]'::jsonb, 'kwargs', %(payload)s::jsonb),
       0, 'django_tasks_db_driver.noop', 'default', 'default', '', '', '[]', now(), {}
  from generate_series(1, %(count)s)
"""
TASKS_DB_DUE = """
status in ('READY', 'RUNNING') and (run_after <= now() or run_after > now() + interval '100 years')
"""

GRAPHILE = """
insert into graphile_worker._private_tasks (identifier) values ('noop') on conflict do nothing;
insert into graphile_worker._private_jobs (task_id, payload, attempts, run_at)
select t.id, %(payload)s::json, {}
  from graphile_worker._private_tasks t, generate_series(1, %(count)s)
 where t.identifier = 'noop'
"""
GRAPHILE_DUE = "run_at <= now() and (locked_at is not null or attempts < max_attempts)"

CHANCY = """
insert into chancy_jobs
       (id, queue, func, kwargs, state, attempts, scheduled_at, started_at, completed_at)
select gen_random_uuid(), 'default', 'chancy_driver.noop', %(payload)s::jsonb, {}
  from generate_series(1, %(count)s)
"""
CHANCY_DUE = "state in ('pending', 'running', 'retrying') and scheduled_at <= now()"

DBOS = """
insert into dbos.workflow_status
       (workflow_uuid, status, name, queue_name, inputs, created_at, updated_at, priority,
        delay_until_epoch_ms)
select gen_random_uuid()::text, {}, 'noop', 'default', %(payload)s, now.ms, now.ms, 0, {}
  from generate_series(1, %(count)s), (select extract(epoch from now())::bigint * 1000) now (ms)
"""
DBOS_DUE = "queue_name = 'default' and status in ('ENQUEUED', 'PENDING')"

OBAN = """
insert into oban_jobs (worker, args, state, attempt, scheduled_at)
select '__main__.Noop', %(payload)s::jsonb, {}
  from generate_series(1, %(count)s)
"""
OBAN_DUE = "state in ('available', 'executing', 'retryable')"

#: A message that was read but not deleted is not done, though it is invisible like a delayed one.
PGMQ_DUE = "(vt <= now() or read_ct > 0)"
PGMQ_DELAYED = """
insert into pgmq.q_bench (vt, message)
select now() + interval '1 day', %(payload)s::jsonb from generate_series(1, %(count)s)
"""
#: It has no failed messages; its manual archives what is not to be read again.
PGMQ_ARCHIVED = """
insert into pgmq.a_bench (msg_id, read_ct, vt, message)
select -n, 20, now(), %(payload)s::jsonb from generate_series(1, %(count)s) n
"""


PEERS = (
    Peer(
        name="graphile",
        title="Graphile Worker",
        driver="graphile.mjs",
        tables="graphile_worker._private_jobs",
        table="graphile_worker._private_jobs",
        due=GRAPHILE_DUE,
        delayed=GRAPHILE.format("0, now() + interval '1 day'"),
        failed=GRAPHILE.format("25, now()"),
    ),
    Peer(
        name="pgqueuer",
        title="PgQueuer",
        driver="pgqueuer_driver.py",
        tables="pgqueuer, pgqueuer_log, pgqueuer_statistics",
        table="pgqueuer",
        due=PGQUEUER_DUE,
        delayed=PGQUEUER.format("'queued', now() + interval '1 day'"),
        failed=PGQUEUER.format("'failed', now()"),
    ),
    Peer(
        name="procrastinate",
        title="procrastinate",
        driver="procrastinate_driver.py",
        tables="procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers",
        table="procrastinate_jobs",
        due=PROCRASTINATE_DUE,
        delayed=PAST_TRIGGERS.format(PROCRASTINATE.format("'todo', 0, now() + interval '1 day'")),
        failed=PAST_TRIGGERS.format(PROCRASTINATE.format("'failed', 1, null")),
        slow=True,
    ),
    Peer(
        name="django_tasks_db",
        title="django-tasks-db",
        driver="django_tasks_db_driver.py",
        tables="django_tasks_database_dbtaskresult",
        table="django_tasks_database_dbtaskresult",
        due=TASKS_DB_DUE,
        delayed=TASKS_DB.format("'READY', null, null, now() + interval '1 day'"),
        failed=TASKS_DB.format("'FAILED', now(), now(), now()"),
        slow=True,
    ),
    Peer(
        name="pgmq",
        title="pgmq",
        driver="pgmq_driver.py",
        tables="pgmq.q_bench, pgmq.a_bench",
        table="pgmq.q_bench",
        due=PGMQ_DUE,
        delayed=PGMQ_DELAYED,
        failed=PGMQ_ARCHIVED,
        id="msg_id",
    ),
    Peer(
        name="chancy",
        title="Chancy",
        driver="chancy_driver.py",
        tables="chancy_jobs",
        table="chancy_jobs",
        due=CHANCY_DUE,
        delayed=CHANCY.format("'pending', 0, now() + interval '1 day', null, null"),
        failed=CHANCY.format("'failed', 1, now(), now(), now()"),
    ),
    Peer(
        name="oban",
        title="Oban for Python",
        driver="oban_driver.py",
        tables="oban_jobs",
        table="oban_jobs",
        due=OBAN_DUE,
        delayed=OBAN.format("'scheduled', 0, timezone('utc', now()) + interval '1 day'"),
        failed=OBAN.format("'discarded', 20, timezone('utc', now())"),
    ),
    Peer(
        name="dbos",
        title="DBOS",
        driver="dbos_driver.py",
        tables="dbos.workflow_status, dbos.workflow_input, dbos.workflow_output",
        table="dbos.workflow_status",
        due=DBOS_DUE,
        delayed=DBOS.format("'DELAYED'", "now.ms + 86400000"),
        failed=DBOS.format("'ERROR'", "null"),
        id="workflow_uuid",
        slow=True,
    ),
)

#: An id is part of the pickled task.
HUEY = Peer(
    name="huey",
    title="Huey",
    driver="huey_driver.py",
    tables="huey_task, huey_kv, huey_schedule, huey_counter",
    table="huey_task",
    due="true",
    id="substring(encode(data, 'escape') from '[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}')",
    slow=True,
)

#: Other backends of Django's tasks that keep them in PostgreSQL.
TASK_BACKENDS = (*(peer for peer in PEERS if peer.name == "django_tasks_db"), HUEY)
