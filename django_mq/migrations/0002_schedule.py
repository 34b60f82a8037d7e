import datetime

import django.db.models.functions.comparison
import django.db.models.functions.datetime
import django.db.models.lookups
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_mq", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Schedule",
            fields=[
                (
                    "name",
                    models.CharField(
                        db_collation="C",
                        max_length=128,
                        primary_key=True,
                        serialize=False,
                        verbose_name="name",
                    ),
                ),
                ("type", models.CharField(db_collation="C", max_length=128, verbose_name="type")),
                (
                    "payload",
                    models.JSONField(
                        blank=True,
                        db_default=models.Value({}, models.JSONField()),
                        default=dict,
                        verbose_name="payload",
                    ),
                ),
                (
                    "metadata",
                    models.JSONField(
                        blank=True,
                        db_default=models.Value({}, models.JSONField()),
                        default=dict,
                        verbose_name="metadata",
                    ),
                ),
                (
                    "cron",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="Minute, hour, day of month, month, day of week, such as 0 6 * * mon-fri.",
                        max_length=256,
                        verbose_name="cron expression",
                    ),
                ),
                (
                    "every",
                    models.DurationField(
                        blank=True,
                        help_text="Instead of cron: an interval, such as 3600 (seconds).",
                        null=True,
                        verbose_name="every",
                    ),
                ),
                (
                    "tz",
                    models.CharField(
                        db_default="UTC",
                        default="UTC",
                        help_text="The time zone of the cron expression, such as Europe/Berlin.",
                        max_length=64,
                        verbose_name="time zone",
                    ),
                ),
                (
                    "queue",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="Empty: the queues of the handlers.",
                        db_collation="C",
                        max_length=128,
                        verbose_name="queue",
                    ),
                ),
                (
                    "catch_up",
                    models.CharField(
                        choices=[
                            ("once", "the latest"),
                            ("all", "all, at most the newest 1,000"),
                            ("none", "none"),
                        ],
                        db_default="once",
                        default="once",
                        help_text="Which missed times to broadcast later.",
                        max_length=8,
                        verbose_name="catch up",
                    ),
                ),
                (
                    "overlap",
                    models.CharField(
                        choices=[("allow", "allowed"), ("skip", "skipped")],
                        db_default="allow",
                        default="allow",
                        help_text="What to do at a due time while the last message still waits or"
                        " runs.",
                        max_length=8,
                        verbose_name="overlap",
                    ),
                ),
                (
                    "expires",
                    models.DurationField(
                        blank=True,
                        help_text="No attempt starts later than this after the broadcast, such as 600 (seconds).",
                        null=True,
                        verbose_name="expires",
                    ),
                ),
                (
                    "source",
                    models.CharField(
                        choices=[("code", "code"), ("admin", "admin")],
                        db_default="admin",
                        default="admin",
                        max_length=8,
                        verbose_name="source",
                    ),
                ),
                (
                    "enabled",
                    models.BooleanField(db_default=True, default=True, verbose_name="enabled"),
                ),
                (
                    "decision",
                    models.BooleanField(
                        help_text="The operator's choice; it overrides the code's.",
                        null=True,
                        verbose_name="decision",
                    ),
                ),
                (
                    "declared_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="declared at"),
                ),
                ("last_at", models.DateTimeField(blank=True, null=True, verbose_name="last time")),
                ("next_at", models.DateTimeField(blank=True, null=True, verbose_name="next time")),
                (
                    "last_message",
                    models.BigIntegerField(blank=True, null=True, verbose_name="last message"),
                ),
                (
                    "last_error",
                    models.TextField(blank=True, db_default="", verbose_name="last error"),
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
                "verbose_name": "schedule",
                "verbose_name_plural": "schedules",
                "db_table_comment": "One row is one schedule: a message broadcast at given times (django_mq)",
                "permissions": (("change_schedule", "Can add, change, run and enable schedules"),),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("next_at__isnull", False)),
                        fields=["next_at", "name"],
                        name="mq_schedule_next",
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("name__regex", "^[A-Za-z0-9_.:/-]+$"),
                            ("queue__regex", "^[A-Za-z0-9_.:/-]*$"),
                            ("type__regex", "^[A-Za-z0-9_.:/-]+$"),
                        ),
                        name="mq_schedule_names",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("cron", ""),
                                ("every__isnull", False),
                                (
                                    "every__range",
                                    (datetime.timedelta(seconds=1), datetime.timedelta(days=36525)),
                                ),
                            ),
                            models.Q(
                                models.Q(("cron", ""), _negated=True), ("every__isnull", True)
                            ),
                            _connector="OR",
                        ),
                        name="mq_schedule_timing",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("enabled", True), ("next_at__isnull", True), _connector="OR"
                        ),
                        name="mq_schedule_off",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("catch_up__in", ("once", "all", "none")),
                            ("overlap__in", ("allow", "skip")),
                            ("source__in", ("code", "admin")),
                        ),
                        name="mq_schedule_choices",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            django.db.models.lookups.GreaterThanOrEqual(
                                django.db.models.functions.comparison.Least(
                                    "declared_at", "last_at", "next_at", "created_at"
                                ),
                                datetime.datetime(1900, 1, 1, 0, 0, tzinfo=datetime.UTC),
                            ),
                            django.db.models.lookups.LessThanOrEqual(
                                django.db.models.functions.comparison.Greatest(
                                    "declared_at", "last_at", "next_at", "created_at"
                                ),
                                datetime.datetime(9998, 12, 31, 0, 0, tzinfo=datetime.UTC),
                            ),
                        ),
                        name="mq_schedule_times",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "expires__range",
                                (datetime.timedelta(0), datetime.timedelta(days=36525)),
                            )
                        ),
                        name="mq_schedule_expires",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Func(
                                models.F("metadata"),
                                output_field=models.BooleanField(),
                                template="jsonb_typeof(%(expressions)s) = 'object'",
                            )
                        ),
                        name="mq_schedule_json",
                    ),
                ],
            },
        ),
    ]
