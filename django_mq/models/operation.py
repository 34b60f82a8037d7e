"""Operations: an action on all messages that match a filter, carried out by workers."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_mq.models.base import StoredModel
from django_mq.models.columns import JSONColumn
from django_mq.models.constraints import has_json_type, times_in_range

ACTION_LABELS = (
    ("requeue", "requeue"),
    ("run_now", "run now"),
    ("cancel", "cancel"),
    ("discard", "discard"),
)
STATE_LABELS = (
    ("waiting", "waiting"),
    ("running", "running"),
    ("done", "done"),
    ("cancelled", "cancelled"),
    ("failed", "failed"),
)


class Operation(StoredModel):
    """An action on all messages that match a filter and are stored when it is requested.

    `after_id` is the id of the last message that it has examined, `last_id` the id of the last
    message that it will examine.
    """

    id = models.BigAutoField(primary_key=True)
    action = models.CharField("action", max_length=8, choices=ACTION_LABELS)
    filter = JSONColumn("filter")
    user_id = models.TextField("user", blank=True, db_default="")
    by = models.TextField("requested by", blank=True, db_default="")
    matched = models.BigIntegerField(
        "matched", null=True, blank=True, help_text="At the time of the request; empty if unknown."
    )
    last_id = models.BigIntegerField("last message")
    after_id = models.BigIntegerField("examined up to", db_default=0)
    done = models.BigIntegerField("changed", db_default=0)
    skipped = models.BigIntegerField("skipped", db_default=0)
    state = models.CharField(
        "state", max_length=9, choices=STATE_LABELS, default="waiting", db_default="waiting"
    )
    error = models.TextField("error", blank=True, db_default="")
    created_at = models.DateTimeField("requested", db_default=Now())
    started_at = models.DateTimeField("started", null=True, blank=True)
    ended_at = models.DateTimeField("ended", null=True, blank=True)

    class Meta:
        verbose_name = "operation"
        verbose_name_plural = "operations"
        db_table_comment = "One row is an action on all messages that match a filter (django_mq)"
        default_permissions = ("view",)
        constraints = (
            models.CheckConstraint(
                name="mq_operation_choices",
                condition=Q(
                    action__in=[name for name, _label in ACTION_LABELS],
                    state__in=[name for name, _label in STATE_LABELS],
                ),
            ),
            models.CheckConstraint(
                name="mq_operation_counts", condition=Q(done__gte=0, skipped__gte=0)
            ),
            times_in_range("mq_operation_times", "created_at", "started_at", "ended_at"),
            has_json_type("mq_operation_filter", filter="object"),
        )
        indexes = (
            models.Index(
                fields=("id",),
                name="mq_operation_open",
                condition=Q(state__in=("waiting", "running")),
            ),
        )

    def __str__(self) -> str:
        return f"operation {self.pk}: {self.action}"
