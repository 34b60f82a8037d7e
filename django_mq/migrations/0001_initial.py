from datetime import UTC, datetime, timedelta

import django.db.models.functions.datetime
from django.db import migrations, models
from django.db.models.functions import Greatest, Least
from django.db.models.lookups import GreaterThanOrEqual, LessThanOrEqual

TIMES = (
    "created_at",
    "processable_after",
    "expires_at",
    "leased_until",
    "held_since",
    "dead_at",
)
STATE_TIMES = (
    "paused_at",
    "paused_until",
    "backoff_changed_at",
    "backoff_until",
    "probe_until",
    "owned_until",
    "warned_at",
    "chores_ran_at",
)
FIRST_TIME, LAST_TIME = datetime(1900, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)
SPANS = (timedelta(0), timedelta(days=36525))


def times_are_times(name: str, *columns: str) -> models.CheckConstraint:
    return models.CheckConstraint(
        condition=models.Q(
            GreaterThanOrEqual(Least(*columns), FIRST_TIME),
            LessThanOrEqual(Greatest(*columns), LAST_TIME),
        ),
        name=name,
    )


def has_json_type(column: str, type: str) -> models.Func:
    return models.Func(
        models.F(column),
        template=f"jsonb_typeof(%(expressions)s) = '{type}'",
        output_field=models.BooleanField(),
    )


# For triggers and other services: such a message has no handler yet, a worker routes it.
# Not SECURITY DEFINER; the search path is pinned to the schema the tables were made in, with the
# caller's temporary tables last, where they can hide nothing.
CREATE_BROADCAST = """
create function mq_broadcast(
    queue text, type text, payload jsonb default '{}', metadata jsonb default '{}',
    processable_after timestamptz default null
) returns bigint
language plpgsql volatile
as $$
declare
    new_id bigint;
begin
    insert into django_mq_queuedmessage (queue, type, payload, metadata, processable_after)
    values (
        mq_broadcast.queue, mq_broadcast.type,
        coalesce(mq_broadcast.payload, '{}'), coalesce(mq_broadcast.metadata, '{}'),
        coalesce(mq_broadcast.processable_after, statement_timestamp())
    )
    returning id into new_id;
    perform pg_notify('django_mq', '');
    return new_id;
end
$$
"""
PIN_SEARCH_PATH = """
do $$
begin
    execute format(
        'alter function mq_broadcast(text, text, jsonb, jsonb, timestamptz)'
        ' set search_path to %I, pg_temp', current_schema());
end
$$
"""
DROP_BROADCAST = "drop function mq_broadcast(text, text, jsonb, jsonb, timestamptz)"

# The tables whose rows live shortly: a message leaves two dead row versions behind (the claim's
# UPDATE, never a HOT one, and the DELETE), a unique id one or two.
# - scale factor 0: by default vacuum waits for a fifth of the table, so a backlog of ten million
#   delayed messages would let two million dead versions pile up before the claim.
# - threshold: 10,000 messages. Reached within autovacuum_naptime from 170 messages a second on.
# - cost delay 0: by default it sleeps 2 ms for every ten pages that it dirties, a budget that all
#   autovacuum workers share. These pages are few and in memory, and are written all the time.
# - truncate: a queue is empty often. Giving its pages back takes an ACCESS EXCLUSIVE lock, which
#   on a standby cancels queries, for a file that has the same size again a little later. TOAST
#   tables inherit the other settings, and not this one.
# docs/scaling.md says why nothing else is set. `ALTER TABLE ... SET` changes them for good: no
# later migration touches what a DBA decided.
SHORT_LIVED = ("django_mq_queuedmessage", "django_mq_uniquekey")
VACUUM_SETTINGS = {
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "20000",
    "autovacuum_vacuum_cost_delay": "0",
    "vacuum_truncate": "false",
    "toast.vacuum_truncate": "false",
}
SETTINGS = ", ".join(f"{name} = {value}" for name, value in VACUUM_SETTINGS.items())
SET_VACUUM = tuple(f"alter table {table} set ({SETTINGS})" for table in SHORT_LIVED)
RESET_VACUUM = tuple(
    f"alter table {table} reset ({', '.join(VACUUM_SETTINGS)})" for table in SHORT_LIVED
)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="WorkerHeartbeat",
            fields=[
                (
                    "id",
                    models.CharField(
                        db_collation="C",
                        max_length=32,
                        primary_key=True,
                        serialize=False,
                        verbose_name="worker",
                    ),
                ),
                ("queues", models.JSONField(verbose_name="queues")),
                ("host", models.CharField(max_length=255, verbose_name="host")),
                ("pid", models.PositiveIntegerField(verbose_name="process")),
                ("version", models.CharField(max_length=32, verbose_name="version")),
                (
                    "wakeup",
                    models.CharField(
                        help_text="notify, poll, or degraded (LISTEN is dead).",
                        max_length=16,
                        verbose_name="woken by",
                    ),
                ),
                ("draining", models.BooleanField(db_default=False, verbose_name="draining")),
                (
                    "running",
                    models.JSONField(
                        help_text="Ids of the messages whose handlers ran at the last beat.",
                        verbose_name="running",
                    ),
                ),
                (
                    "timings",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()),
                        help_text="By handler: the number of attempts, and how long they waited and ran.",
                        verbose_name="timings",
                    ),
                ),
                (
                    "sessions",
                    models.JSONField(
                        db_default=models.Value([], models.JSONField()),
                        help_text=(
                            "Server sessions that run messages of ordered queues: process id and"
                            " start."
                        ),
                        verbose_name="sessions",
                    ),
                ),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="started at",
                    ),
                ),
                (
                    "last_seen",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="last seen",
                    ),
                ),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "db_table_comment": "One row is one worker process (django_mq)",
                "default_permissions": ("view",),
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("id__regex", "^[A-Za-z0-9_.:/-]+$")),
                        name="mq_worker_name",
                    ),
                    times_are_times("mq_worker_times", "started_at", "last_seen"),
                    models.CheckConstraint(
                        condition=models.Q(
                            has_json_type("queues", "array"),
                            has_json_type("running", "array"),
                            has_json_type("timings", "object"),
                            has_json_type("sessions", "array"),
                        ),
                        name="mq_worker_json",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="FailedAttempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("message_id", models.BigIntegerField(verbose_name="message")),
                ("queue", models.CharField(db_collation="C", max_length=128, verbose_name="queue")),
                ("type", models.CharField(db_collation="C", max_length=128, verbose_name="type")),
                (
                    "handler",
                    models.CharField(
                        blank=True, db_collation="C", max_length=128, verbose_name="handler"
                    ),
                ),
                ("attempt", models.PositiveIntegerField(verbose_name="attempt")),
                (
                    "worker",
                    models.CharField(
                        blank=True, db_collation="C", max_length=64, verbose_name="worker"
                    ),
                ),
                (
                    "started_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="started at"),
                ),
                (
                    "ended_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="ended at",
                    ),
                ),
                ("error_class", models.TextField(blank=True, verbose_name="error class")),
                ("error_text", models.TextField(blank=True, verbose_name="error text")),
                ("traceback", models.TextField(blank=True, verbose_name="traceback")),
            ],
            options={
                "verbose_name": "failed attempt",
                "verbose_name_plural": "failed attempts",
                "db_table_comment": "One row is one failed attempt (django_mq)",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["message_id", "attempt"], name="mq_attempt_message"),
                    models.Index(fields=["ended_at"], name="mq_attempt_ended"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("handler__regex", "^[A-Za-z0-9_.:/-]*$"),
                            ("queue__regex", "^[A-Za-z0-9_.:/-]+$"),
                            ("type__regex", "^[A-Za-z0-9_.:/-]+$"),
                        ),
                        name="mq_attempt_names",
                    ),
                    times_are_times("mq_attempt_times", "started_at", "ended_at"),
                ],
            },
        ),
        migrations.CreateModel(
            name="QueuedMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(db_collation="C", max_length=128, verbose_name="queue")),
                ("type", models.CharField(db_collation="C", max_length=128, verbose_name="type")),
                (
                    "schema_version",
                    models.IntegerField(db_default=1, verbose_name="schema version"),
                ),
                ("payload", models.JSONField(verbose_name="payload")),
                (
                    "metadata",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()), verbose_name="metadata"
                    ),
                ),
                (
                    "handler",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="Name of the handler whose copy this is; empty: routed at delivery.",
                        db_collation="C",
                        max_length=128,
                        verbose_name="handler",
                    ),
                ),
                ("priority", models.SmallIntegerField(db_default=0, verbose_name="priority")),
                (
                    "key",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        max_length=128,
                        null=True,
                        verbose_name="order key",
                    ),
                ),
                (
                    "processable_after",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="processable after",
                    ),
                ),
                (
                    "leased_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="leased until"),
                ),
                (
                    "claimed_by",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        max_length=64,
                        null=True,
                        verbose_name="claimed by",
                    ),
                ),
                ("attempts", models.IntegerField(db_default=0, verbose_name="attempts")),
                (
                    "max_attempts",
                    models.IntegerField(db_default=20, verbose_name="attempts at most"),
                ),
                ("retry", models.JSONField(blank=True, null=True, verbose_name="retry policy")),
                (
                    "expires_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="expires at"),
                ),
                (
                    "blocked_by",
                    models.BigIntegerField(blank=True, null=True, verbose_name="blocked by"),
                ),
                (
                    "held_since",
                    models.DateTimeField(blank=True, null=True, verbose_name="held since"),
                ),
                ("suspect", models.BooleanField(db_default=False, verbose_name="suspect")),
                (
                    "unique_id",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        max_length=128,
                        null=True,
                        verbose_name="unique id",
                    ),
                ),
                (
                    "unique_for",
                    models.DurationField(blank=True, null=True, verbose_name="unique for"),
                ),
                (
                    "wants_result",
                    models.BooleanField(db_default=False, verbose_name="wants a result"),
                ),
                (
                    "ordered",
                    models.BooleanField(
                        db_default=False,
                        help_text="One of the line of an ordered queue.",
                        verbose_name="in line",
                    ),
                ),
                (
                    "last_error",
                    models.TextField(blank=True, db_default="", verbose_name="last error"),
                ),
                ("dead_at", models.DateTimeField(blank=True, null=True, verbose_name="dead at")),
                (
                    "dead_reason",
                    models.TextField(blank=True, db_default="", verbose_name="dead because"),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="created at",
                    ),
                ),
            ],
            options={
                "verbose_name": "message",
                "verbose_name_plural": "messages",
                "db_table_comment": "One row is one message for one subscriber (django_mq)",
                "permissions": (
                    ("requeue_message", "Can requeue a dead letter"),
                    ("run_message", "Can make a message run now"),
                    ("cancel_message", "Can cancel a waiting message"),
                    ("discard_message", "Can discard a dead letter"),
                    ("view_payload", "Can see payloads and error texts"),
                ),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        models.F("queue"),
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("processable_after"),
                        models.F("id"),
                        condition=models.Q(
                            ("blocked_by__isnull", True),
                            ("dead_at__isnull", True),
                            ("leased_until__isnull", True),
                        ),
                        name="mq_claim",
                    ),
                    models.Index(
                        condition=models.Q(("leased_until__isnull", False)),
                        fields=["queue", "leased_until", "id"],
                        name="mq_lease",
                    ),
                    models.Index(
                        condition=models.Q(("key__isnull", False)),
                        fields=["queue", "handler", "key", "id"],
                        name="mq_key",
                    ),
                    models.Index(
                        condition=models.Q(("key__isnull", False), ("leased_until__isnull", False)),
                        fields=["queue", "handler", "key"],
                        name="mq_key_leased",
                    ),
                    models.Index(
                        condition=models.Q(("blocked_by__isnull", False)),
                        fields=["blocked_by"],
                        name="mq_blocked",
                    ),
                    models.Index(
                        condition=models.Q(("ordered", True)),
                        fields=["queue", "id"],
                        name="mq_line",
                    ),
                    models.Index(
                        condition=models.Q(("dead_at__isnull", False)),
                        fields=["queue", "dead_at", "id"],
                        name="mq_dead",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("dead_at__isnull", True), ("expires_at__isnull", False)
                        ),
                        fields=["expires_at"],
                        name="mq_expiry",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("queue__regex", "^[A-Za-z0-9_.:/-]+$")),
                        name="mq_queue_name",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("type__regex", "^[A-Za-z0-9_.:/-]+$")),
                        name="mq_type_name",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("handler__regex", "^[A-Za-z0-9_.:/-]*$")),
                        name="mq_handler_name",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("key__regex", "^[^\\u0001-\\u001F\\u007F-\\u009F]+$")),
                        name="mq_key_name",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("unique_id__regex", "^[^\\u0001-\\u001F\\u007F-\\u009F]+$")
                        ),
                        name="mq_unique_id_name",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("priority__range", (-100, 100))),
                        name="mq_priority_range",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("schema_version__gte", 1)),
                        name="mq_schema_version_positive",
                    ),
                    times_are_times("mq_times_are_times", *TIMES),
                    models.CheckConstraint(
                        condition=models.Q(("unique_for__range", SPANS)),
                        name="mq_unique_for_range",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempts__gte", 0),
                            ("attempts__lt", 2147483647),
                            ("max_attempts__gte", 0),
                            ("max_attempts__lt", 2147483647),
                        ),
                        name="mq_attempts_bounded",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("claimed_by__isnull", True), ("leased_until__isnull", True)),
                            models.Q(
                                ("claimed_by__isnull", False),
                                ("dead_at__isnull", True),
                                ("leased_until__isnull", False),
                            ),
                            _connector="OR",
                        ),
                        name="mq_lease_has_claimer",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="QueueState",
            fields=[
                (
                    "queue",
                    models.CharField(
                        db_collation="C",
                        max_length=128,
                        primary_key=True,
                        serialize=False,
                        verbose_name="queue",
                    ),
                ),
                (
                    "paused_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="paused at"),
                ),
                (
                    "paused_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="paused until"),
                ),
                (
                    "backoff_level",
                    models.PositiveSmallIntegerField(db_default=0, verbose_name="backoff level"),
                ),
                (
                    "backoff_changed_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="backoff changed at"),
                ),
                (
                    "backoff_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="backing off until"),
                ),
                (
                    "probe_by",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        max_length=64,
                        null=True,
                        verbose_name="probe by",
                    ),
                ),
                (
                    "probe_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="probe until"),
                ),
                (
                    "max_in_flight",
                    models.PositiveIntegerField(
                        blank=True, null=True, verbose_name="in flight at most"
                    ),
                ),
                (
                    "owner",
                    models.CharField(
                        blank=True, db_collation="C", max_length=64, null=True, verbose_name="owner"
                    ),
                ),
                (
                    "owned_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="owned until"),
                ),
                (
                    "warned_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="warned at"),
                ),
                (
                    "chores_ran_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="chores ran at"),
                ),
                (
                    "chores_resume",
                    models.JSONField(blank=True, null=True, verbose_name="chores resume at"),
                ),
            ],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "db_table_comment": "One row is the state of one queue (django_mq)",
                "permissions": (("change_queue", "Can pause, resume and limit a queue"),),
                "default_permissions": ("view",),
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("owner__regex", "^[A-Za-z0-9_.:/-]+$"),
                            ("probe_by__regex", "^[A-Za-z0-9_.:/-]+$"),
                            ("queue__regex", "^[A-Za-z0-9_.:/-]+$"),
                        ),
                        name="mq_state_queue_name",
                    ),
                    times_are_times("mq_state_times", *STATE_TIMES),
                ],
            },
        ),
        migrations.CreateModel(
            name="Result",
            fields=[
                (
                    "message_id",
                    models.BigIntegerField(
                        primary_key=True, serialize=False, verbose_name="message"
                    ),
                ),
                (
                    "handler",
                    models.CharField(
                        blank=True, db_collation="C", max_length=128, verbose_name="handler"
                    ),
                ),
                ("value", models.JSONField(null=True, verbose_name="value")),
                (
                    "error_class",
                    models.TextField(blank=True, db_default="", verbose_name="error class"),
                ),
                (
                    "error_text",
                    models.TextField(blank=True, db_default="", verbose_name="error text"),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="created at",
                    ),
                ),
                (
                    "queue",
                    models.CharField(
                        blank=True,
                        db_collation="C",
                        db_default="",
                        max_length=128,
                        verbose_name="queue",
                    ),
                ),
                (
                    "priority",
                    models.SmallIntegerField(blank=True, null=True, verbose_name="priority"),
                ),
                ("payload", models.JSONField(blank=True, null=True, verbose_name="payload")),
                ("metadata", models.JSONField(blank=True, null=True, verbose_name="metadata")),
                (
                    "enqueued_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="enqueued at"),
                ),
                ("attempts", models.JSONField(blank=True, null=True, verbose_name="attempts")),
                (
                    "keep_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="keep until"),
                ),
            ],
            options={
                "verbose_name": "result",
                "verbose_name_plural": "results",
                "db_table_comment": "Return values of handlers, for requests and tasks (django_mq)",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("keep_until__isnull", True)),
                        fields=["created_at"],
                        name="mq_result_created",
                    ),
                    models.Index(
                        condition=models.Q(("keep_until__isnull", False)),
                        fields=["keep_until"],
                        name="mq_result_keep",
                    ),
                ],
                "constraints": [
                    times_are_times("mq_result_times", "created_at", "enqueued_at", "keep_until"),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("handler__regex", "^[A-Za-z0-9_.:/-]*$"),
                            ("queue__regex", "^[A-Za-z0-9_.:/-]*$"),
                        ),
                        name="mq_result_names",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(has_json_type("attempts", "array")),
                        name="mq_result_attempts",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="UniqueKey",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(db_collation="C", max_length=128, verbose_name="queue")),
                (
                    "handler",
                    models.CharField(
                        blank=True,
                        db_default="",
                        db_collation="C",
                        max_length=128,
                        verbose_name="handler",
                    ),
                ),
                ("type", models.CharField(db_collation="C", max_length=128, verbose_name="type")),
                (
                    "unique_id",
                    models.CharField(db_collation="C", max_length=128, verbose_name="unique id"),
                ),
                (
                    "message_id",
                    models.BigIntegerField(blank=True, null=True, verbose_name="message"),
                ),
                (
                    "unique_for",
                    models.DurationField(
                        blank=True,
                        help_text="How long it stays taken once its message is handled.",
                        null=True,
                        verbose_name="unique for",
                    ),
                ),
                (
                    "quiet_until",
                    models.DateTimeField(blank=True, null=True, verbose_name="quiet until"),
                ),
                ("put_aside", models.JSONField(blank=True, null=True, verbose_name="put aside")),
            ],
            options={
                "verbose_name": "unique id",
                "verbose_name_plural": "unique ids",
                "db_table_comment": "One row is one unique id that is taken (django_mq)",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("quiet_until__isnull", False)),
                        fields=["quiet_until"],
                        name="mq_unique_quiet",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("put_aside__isnull", True)),
                        fields=("unique_id", "type", "queue", "handler"),
                        name="mq_unique",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("put_aside__isnull", False)),
                        fields=("unique_id", "type", "queue", "handler"),
                        name="mq_unique_aside",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("put_aside__isnull", True),
                            models.Q(
                                ("handler__regex", "^[A-Za-z0-9_.:/-]*$"),
                                ("queue__regex", "^[A-Za-z0-9_.:/-]+$"),
                                ("type__regex", "^[A-Za-z0-9_.:/-]+$"),
                                ("unique_id__regex", "^[^\\u0001-\\u001F\\u007F-\\u009F]+$"),
                            ),
                            _connector="OR",
                        ),
                        name="mq_unique_names",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("quiet_until__range", (FIRST_TIME, LAST_TIME))),
                        name="mq_unique_times",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("unique_for__range", SPANS)),
                        name="mq_unique_range",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(has_json_type("put_aside", "object")),
                        name="mq_unique_aside_shape",
                    ),
                ],
            },
        ),
        migrations.RunSQL(CREATE_BROADCAST, DROP_BROADCAST),
        migrations.RunSQL(PIN_SEARCH_PATH, migrations.RunSQL.noop),
        migrations.RunSQL(SET_VACUUM, RESET_VACUUM),
    ]
