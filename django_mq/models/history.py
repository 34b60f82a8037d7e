"""History: messages whose handlers succeeded, if the queue or the handler keeps them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_mq.models.base import StoredModel
from django_mq.models.columns import JSONColumn
from django_mq.models.constraints import times_in_range
from django_mq.policy.column_bounds import KEY, MAX_NAME, NAME, NAME_OR_EMPTY


class HandledMessage(StoredModel):
    """One message whose handler succeeded; `id` is the id that the message had in its queue.

    The table is partitioned by the day (UTC) of `ended_at`. Its primary key is (id, ended_at): a
    unique index of a partitioned table includes the partition key. `payload` and `metadata` are
    null unless `history_payload` was set.
    """

    id = models.BigIntegerField("message", primary_key=True)
    queue = models.CharField("queue", max_length=MAX_NAME, db_collation="C")
    type = models.CharField("type", max_length=MAX_NAME, db_collation="C")
    schema_version = models.IntegerField("schema version", db_default=1)
    handler = models.CharField(
        "handler", max_length=MAX_NAME, db_collation="C", blank=True, db_default=""
    )
    key = models.CharField(  # noqa: DJ001
        "order key", max_length=MAX_NAME, db_collation="C", null=True, blank=True
    )
    priority = models.SmallIntegerField("priority", db_default=0)
    attempts = models.IntegerField("attempts", db_default=1)
    worker = models.CharField("worker", max_length=64, db_collation="C", blank=True, db_default="")
    size = models.IntegerField("size", db_default=0, help_text="Bytes of the payload as JSON text.")
    correlation_id = models.CharField(  # noqa: DJ001
        "correlation id", max_length=MAX_NAME, db_collation="C", null=True, blank=True
    )
    causation_id = models.BigIntegerField("caused by", null=True, blank=True)
    created_at = models.DateTimeField("created at", db_default=Now())
    due_at = models.DateTimeField("due at", db_default=Now())
    started_at = models.DateTimeField("started at", db_default=Now())
    ended_at = models.DateTimeField("ended at", db_default=Now())
    keep_until = models.DateTimeField("keep until")
    payload = JSONColumn("payload", null=True, blank=True)
    metadata = JSONColumn("metadata", null=True, blank=True)

    class Meta:
        verbose_name = "handled message"
        verbose_name_plural = "handled messages"
        db_table_comment = "One row is one message whose handler succeeded (django_mq)"
        default_permissions = ("view",)
        permissions = (("replay_message", "Can broadcast handled messages again"),)
        # No constraint may reject the values of a stored message: it would refuse the settle.
        constraints = (
            models.CheckConstraint(
                name="mq_handled_names",
                condition=Q(
                    queue__regex=NAME,
                    type__regex=NAME,
                    handler__regex=NAME_OR_EMPTY,
                    key__regex=KEY,
                ),
            ),
            times_in_range(
                "mq_handled_times", "created_at", "due_at", "started_at", "ended_at", "keep_until"
            ),
        )
        indexes = (
            models.Index(fields=("ended_at", "id"), name="mq_handled_ended"),
            models.Index(fields=("keep_until",), name="mq_handled_keep"),
            models.Index(
                fields=("causation_id",),
                name="mq_handled_cause",
                condition=Q(causation_id__isnull=False),
            ),
            models.Index(
                fields=("correlation_id",),
                name="mq_handled_chain",
                condition=Q(correlation_id__isnull=False),
            ),
            models.Index(fields=("key",), name="mq_handled_key", condition=Q(key__isnull=False)),
        )

    def __str__(self) -> str:
        return f"{self.type} #{self.pk}, handled"
