"""Schedules: messages that workers broadcast at given times."""

from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_mq.models.base import StoredModel
from django_mq.models.columns import DurationColumn, JSONColumn
from django_mq.models.constraints import has_json_type, span_in_range, times_in_range
from django_mq.policy.column_bounds import MAX_NAME, MAX_SPAN, NAME, NAME_OR_EMPTY
from django_mq.policy.due_times import CATCH_UP, OVERLAP

# Labels of the values of policy.due_times, and of the sources of schedules.
CATCH_UP_LABELS = (
    ("once", "the latest"),
    ("all", "all, at most the newest 1,000"),
    ("none", "none"),
)
OVERLAP_LABELS = (("allow", "allowed"), ("skip", "skipped"))
SOURCE_LABELS = (("code", "code"), ("admin", "admin"))


class Schedule(StoredModel):
    """A message that workers broadcast at given times. It is off while `next_at` is null."""

    name = models.CharField("name", max_length=MAX_NAME, db_collation="C", primary_key=True)
    type = models.CharField("type", max_length=MAX_NAME, db_collation="C")
    payload = JSONColumn(
        "payload", blank=True, default=dict, db_default=models.Value({}, models.JSONField())
    )
    metadata = JSONColumn(
        "metadata", blank=True, default=dict, db_default=models.Value({}, models.JSONField())
    )
    cron = models.CharField(
        "cron expression",
        max_length=256,
        blank=True,
        db_default="",
        help_text="Minute, hour, day of month, month, day of week, such as 0 6 * * mon-fri.",
    )
    every = DurationColumn(
        "every",
        null=True,
        blank=True,
        help_text="Instead of cron: an interval, such as 3600 (seconds).",
    )
    tz = models.CharField(
        "time zone",
        max_length=64,
        default="UTC",
        db_default="UTC",
        help_text="The time zone of the cron expression, such as Europe/Berlin.",
    )
    queue = models.CharField(
        "queue",
        max_length=MAX_NAME,
        db_collation="C",
        blank=True,
        db_default="",
        help_text="Empty: the queues of the handlers.",
    )
    catch_up = models.CharField(
        "catch up",
        max_length=8,
        choices=CATCH_UP_LABELS,
        default="once",
        db_default="once",
        help_text="Which missed times to broadcast later.",
    )
    overlap = models.CharField(
        "overlap",
        max_length=8,
        choices=OVERLAP_LABELS,
        default="allow",
        db_default="allow",
        help_text="What to do at a due time while the last message still waits or runs.",
    )
    expires = DurationColumn(
        "expires",
        null=True,
        blank=True,
        help_text="For how long after the broadcast an attempt may start, such as 600 (seconds).",
    )
    source = models.CharField(
        "source", max_length=8, choices=SOURCE_LABELS, default="admin", db_default="admin"
    )
    enabled = models.BooleanField("enabled", default=True, db_default=True)
    decision = models.BooleanField(
        "operator's choice",
        null=True,
        help_text="Set once an operator enables or disables it; overrides the code.",
    )
    declared_at = models.DateTimeField("declared at", null=True, blank=True)
    last_at = models.DateTimeField("last due time", null=True, blank=True)
    next_at = models.DateTimeField("next due time", null=True, blank=True)
    last_message = models.BigIntegerField("last message", null=True, blank=True)
    last_error = models.TextField("last error", blank=True, db_default="")
    created_at = models.DateTimeField("created at", db_default=Now())

    class Meta:
        verbose_name = "schedule"
        verbose_name_plural = "schedules"
        db_table_comment = "One row is one schedule: a message broadcast at given times (django_mq)"
        default_permissions = ("view",)
        permissions = (("change_schedule", "Can add, change, run and enable schedules"),)
        constraints = (
            models.CheckConstraint(
                name="mq_schedule_names",
                condition=Q(name__regex=NAME, type__regex=NAME, queue__regex=NAME_OR_EMPTY),
            ),
            models.CheckConstraint(
                name="mq_schedule_timing",
                condition=Q(
                    cron="", every__isnull=False, every__range=(timedelta(seconds=1), MAX_SPAN)
                )
                | Q(~Q(cron=""), every__isnull=True),
            ),
            models.CheckConstraint(
                name="mq_schedule_off", condition=Q(enabled=True) | Q(next_at__isnull=True)
            ),
            models.CheckConstraint(
                name="mq_schedule_choices",
                condition=Q(
                    catch_up__in=CATCH_UP, overlap__in=OVERLAP, source__in=("code", "admin")
                ),
            ),
            times_in_range("mq_schedule_times", "declared_at", "last_at", "next_at", "created_at"),
            span_in_range("mq_schedule_expires", "expires"),
            has_json_type("mq_schedule_json", metadata="object"),
        )
        indexes = (
            models.Index(
                fields=("next_at", "name"),
                name="mq_schedule_next",
                condition=Q(next_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return self.name
