import datetime

import django.db.models.functions.comparison
import django.db.models.functions.datetime
import django.db.models.lookups
from django.db import migrations, models

# Django cannot declare a partitioned table. Rows of a day without a partition go to the default
# partition, so that a day that nobody created never refuses a settle; workers create the days.
# `(id, ended_at)`: a unique index of a partitioned table includes the partition key.
CREATE_TABLE = r"""
create table django_mq_handledmessage (
    id bigint not null,
    queue varchar(128) collate "C" not null,
    type varchar(128) collate "C" not null,
    schema_version integer default 1 not null,
    handler varchar(128) collate "C" default '' not null,
    key varchar(128) collate "C",
    priority smallint default 0 not null,
    attempts integer default 1 not null,
    worker varchar(64) collate "C" default '' not null,
    size integer default 0 not null,
    correlation_id varchar(128) collate "C",
    causation_id bigint,
    created_at timestamptz default statement_timestamp() not null,
    due_at timestamptz default statement_timestamp() not null,
    started_at timestamptz default statement_timestamp() not null,
    ended_at timestamptz default statement_timestamp() not null,
    keep_until timestamptz not null,
    payload jsonb,
    metadata jsonb,
    constraint mq_handled_pkey primary key (id, ended_at),
    constraint mq_handled_names check (
        handler ~ '^[A-Za-z0-9_.:/-]*$' and key ~ '^[^\u0001-\u001F\u007F-\u009F]+$'
        and queue ~ '^[A-Za-z0-9_.:/-]+$' and type ~ '^[A-Za-z0-9_.:/-]+$'
    ),
    constraint mq_handled_times check (
        least(created_at, due_at, started_at, ended_at, keep_until)
            >= '1900-01-01 00:00:00+00'::timestamptz
        and greatest(created_at, due_at, started_at, ended_at, keep_until)
            <= '9998-12-31 00:00:00+00'::timestamptz
    )
) partition by range (ended_at);
create table django_mq_handledmessage_default
    partition of django_mq_handledmessage default;
create index mq_handled_ended on django_mq_handledmessage (ended_at, id);
create index mq_handled_keep on django_mq_handledmessage (keep_until);
create index mq_handled_cause on django_mq_handledmessage (causation_id)
    where causation_id is not null;
create index mq_handled_chain on django_mq_handledmessage (correlation_id)
    where correlation_id is not null;
create index mq_handled_key on django_mq_handledmessage (key) where key is not null;
comment on table django_mq_handledmessage
    is 'One row is one message whose handler succeeded (django_mq)'
"""
DROP_TABLE = "drop table django_mq_handledmessage"


class Migration(migrations.Migration):
    dependencies = [
        ("django_mq", "0003_figures"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunSQL(CREATE_TABLE, DROP_TABLE)],
            state_operations=[
                migrations.CreateModel(
                    name="HandledMessage",
                    fields=[
                        (
                            "id",
                            models.BigIntegerField(
                                primary_key=True, serialize=False, verbose_name="message"
                            ),
                        ),
                        (
                            "queue",
                            models.CharField(
                                db_collation="C", max_length=128, verbose_name="queue"
                            ),
                        ),
                        (
                            "type",
                            models.CharField(db_collation="C", max_length=128, verbose_name="type"),
                        ),
                        (
                            "schema_version",
                            models.IntegerField(db_default=1, verbose_name="schema version"),
                        ),
                        (
                            "handler",
                            models.CharField(
                                blank=True,
                                db_collation="C",
                                db_default="",
                                max_length=128,
                                verbose_name="handler",
                            ),
                        ),
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
                            "priority",
                            models.SmallIntegerField(db_default=0, verbose_name="priority"),
                        ),
                        ("attempts", models.IntegerField(db_default=1, verbose_name="attempts")),
                        (
                            "worker",
                            models.CharField(
                                blank=True,
                                db_collation="C",
                                db_default="",
                                max_length=64,
                                verbose_name="worker",
                            ),
                        ),
                        (
                            "size",
                            models.IntegerField(
                                db_default=0,
                                help_text="Bytes of the payload as JSON text.",
                                verbose_name="size",
                            ),
                        ),
                        (
                            "correlation_id",
                            models.CharField(
                                blank=True,
                                db_collation="C",
                                max_length=128,
                                null=True,
                                verbose_name="correlation id",
                            ),
                        ),
                        (
                            "causation_id",
                            models.BigIntegerField(blank=True, null=True, verbose_name="caused by"),
                        ),
                        (
                            "created_at",
                            models.DateTimeField(
                                db_default=django.db.models.functions.datetime.Now(),
                                verbose_name="created at",
                            ),
                        ),
                        (
                            "due_at",
                            models.DateTimeField(
                                db_default=django.db.models.functions.datetime.Now(),
                                verbose_name="due at",
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
                            "ended_at",
                            models.DateTimeField(
                                db_default=django.db.models.functions.datetime.Now(),
                                verbose_name="ended at",
                            ),
                        ),
                        ("keep_until", models.DateTimeField(verbose_name="keep until")),
                        (
                            "payload",
                            models.JSONField(blank=True, null=True, verbose_name="payload"),
                        ),
                        (
                            "metadata",
                            models.JSONField(blank=True, null=True, verbose_name="metadata"),
                        ),
                    ],
                    options={
                        "verbose_name": "handled message",
                        "verbose_name_plural": "handled messages",
                        "db_table_comment": "One row is one message whose handler succeeded (django_mq)",
                        "permissions": (
                            ("replay_message", "Can broadcast handled messages again"),
                        ),
                        "default_permissions": ("view",),
                        "indexes": [
                            models.Index(fields=["ended_at", "id"], name="mq_handled_ended"),
                            models.Index(fields=["keep_until"], name="mq_handled_keep"),
                            models.Index(
                                condition=models.Q(("causation_id__isnull", False)),
                                fields=["causation_id"],
                                name="mq_handled_cause",
                            ),
                            models.Index(
                                condition=models.Q(("correlation_id__isnull", False)),
                                fields=["correlation_id"],
                                name="mq_handled_chain",
                            ),
                            models.Index(
                                condition=models.Q(("key__isnull", False)),
                                fields=["key"],
                                name="mq_handled_key",
                            ),
                        ],
                        "constraints": [
                            models.CheckConstraint(
                                condition=models.Q(
                                    ("handler__regex", "^[A-Za-z0-9_.:/-]*$"),
                                    ("key__regex", "^[^\\u0001-\\u001F\\u007F-\\u009F]+$"),
                                    ("queue__regex", "^[A-Za-z0-9_.:/-]+$"),
                                    ("type__regex", "^[A-Za-z0-9_.:/-]+$"),
                                ),
                                name="mq_handled_names",
                            ),
                            models.CheckConstraint(
                                condition=models.Q(
                                    django.db.models.lookups.GreaterThanOrEqual(
                                        django.db.models.functions.comparison.Least(
                                            "created_at",
                                            "due_at",
                                            "started_at",
                                            "ended_at",
                                            "keep_until",
                                        ),
                                        datetime.datetime(1900, 1, 1, 0, 0, tzinfo=datetime.UTC),
                                    ),
                                    django.db.models.lookups.LessThanOrEqual(
                                        django.db.models.functions.comparison.Greatest(
                                            "created_at",
                                            "due_at",
                                            "started_at",
                                            "ended_at",
                                            "keep_until",
                                        ),
                                        datetime.datetime(9998, 12, 31, 0, 0, tzinfo=datetime.UTC),
                                    ),
                                ),
                                name="mq_handled_times",
                            ),
                        ],
                    },
                ),
            ],
        ),
    ]
