"""Records kept beside messages: failed attempts, results, taken unique ids."""

from __future__ import annotations

from django.db import models
from django.db.models import Func, Q
from django.db.models.functions import Now

from django_mq.models.base import StoredModel
from django_mq.models.columns import DurationColumn, GeneratedColumn, JSONColumn
from django_mq.models.constraints import has_json_type, span_in_range, times_in_range
from django_mq.policy.column_bounds import KEY, MAX_NAME, NAME, NAME_OR_EMPTY


class FailedAttempt(StoredModel):
    """One failed attempt. The row outlives its message, so a late success keeps its history."""

    id = models.BigAutoField(primary_key=True)
    message_id = models.BigIntegerField("message")
    queue = models.CharField("queue", max_length=MAX_NAME, db_collation="C")
    type = models.CharField("type", max_length=MAX_NAME, db_collation="C")
    handler = models.CharField("handler", max_length=MAX_NAME, db_collation="C", blank=True)
    attempt = models.PositiveIntegerField("attempt")
    worker = models.CharField("worker", max_length=64, db_collation="C", blank=True)
    started_at = models.DateTimeField("started at", null=True, blank=True)
    ended_at = models.DateTimeField("ended at", db_default=Now())
    error_class = models.TextField("error class", blank=True)
    error_text = models.TextField("error text", blank=True)
    traceback = models.TextField("traceback", blank=True)
    place = models.TextField(
        "place",
        blank=True,
        db_default="",
        help_text="Module and function that failed; empty if no traceback shows it.",
    )
    # The database computes the fingerprint, so that it does not depend on the program that writes
    # an attempt. `decode(..., 'escape')` is the only immutable way to the bytes of a text.
    fingerprint = GeneratedColumn(
        verbose_name="fingerprint",
        expression=Func(
            "error_class",
            "handler",
            "place",
            arg_joiner=" || chr(10) || ",
            template=(
                r"left(encode(sha256(decode(replace(%(expressions)s, '\', '\\'), 'escape')),"
                " 'hex'), 16)"
            ),
        ),
        output_field=models.CharField(max_length=16, db_collation="C"),
        db_persist=True,
    )

    class Meta:
        verbose_name = "failed attempt"
        verbose_name_plural = "failed attempts"
        db_table_comment = "One row is one failed attempt (django_mq)"
        default_permissions = ("view",)
        constraints = (
            # Not the worker: it is copied from a row whose claimer another program may have
            # written, and a refused take-over would stop its whole batch.
            models.CheckConstraint(
                name="mq_attempt_names",
                condition=Q(
                    queue__regex=NAME,
                    type__regex=NAME,
                    handler__regex=NAME_OR_EMPTY,
                ),
            ),
            times_in_range("mq_attempt_times", "started_at", "ended_at"),
        )
        indexes = (
            models.Index(fields=("message_id", "attempt"), name="mq_attempt_message"),
            models.Index(fields=("ended_at",), name="mq_attempt_ended"),
            # For groups, and for the newest attempt of each.
            models.Index(
                fields=("fingerprint", "queue", "ended_at"), name="mq_attempt_fingerprint"
            ),
        )

    def __str__(self) -> str:
        return f"attempt {self.attempt} of message {self.message_id}"


class Result(StoredModel):
    """A handler's return value, or its final error, if the producer requested the result.

    The result of a Django task also has its message's columns, and its attempts: workers, times
    and errors. `keep_until` is null if RESULT_RETENTION applies.
    """

    message_id = models.BigIntegerField("message", primary_key=True)
    handler = models.CharField("handler", max_length=MAX_NAME, db_collation="C", blank=True)
    value = JSONColumn("value", null=True)
    error_class = models.TextField("error class", blank=True, db_default="")
    error_text = models.TextField("error text", blank=True, db_default="")
    created_at = models.DateTimeField("created at", db_default=Now())
    queue = models.CharField(
        "queue", max_length=MAX_NAME, db_collation="C", blank=True, db_default=""
    )
    priority = models.SmallIntegerField("priority", null=True, blank=True)
    payload = JSONColumn("payload", null=True, blank=True)
    metadata = JSONColumn("metadata", null=True, blank=True)
    enqueued_at = models.DateTimeField("enqueued at", null=True, blank=True)
    attempts = JSONColumn("attempts", null=True, blank=True)
    keep_until = models.DateTimeField("keep until", null=True, blank=True)

    class Meta:
        verbose_name = "result"
        verbose_name_plural = "results"
        db_table_comment = "Return values of handlers, for requests and tasks (django_mq)"
        default_permissions = ("view",)
        constraints = (
            models.CheckConstraint(
                name="mq_result_names",
                condition=Q(handler__regex=NAME_OR_EMPTY, queue__regex=NAME_OR_EMPTY),
            ),
            times_in_range("mq_result_times", "created_at", "enqueued_at", "keep_until"),
            has_json_type("mq_result_attempts", attempts="array"),
        )
        indexes = (
            models.Index(
                fields=("created_at",),
                name="mq_result_created",
                condition=Q(keep_until__isnull=True),
            ),
            models.Index(
                fields=("keep_until",), name="mq_result_keep", condition=Q(keep_until__isnull=False)
            ),
        )

    def __str__(self) -> str:
        return f"result of message {self.message_id}"


class UniqueKey(StoredModel):
    """A taken unique id, with its message or the end of its quiet time; or a message put aside.

    A message put aside has a row of its own, so a worker that ends a message never waits for a
    transaction that puts another one aside. An id is taken only while its message's row exists:
    deleting that row by hand frees the id.
    """

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField("queue", max_length=MAX_NAME, db_collation="C")
    handler = models.CharField(
        "handler", max_length=MAX_NAME, db_collation="C", blank=True, db_default=""
    )
    type = models.CharField("type", max_length=MAX_NAME, db_collation="C")
    unique_id = models.CharField("unique id", max_length=MAX_NAME, db_collation="C")
    message_id = models.BigIntegerField("message", null=True, blank=True)
    unique_for = DurationColumn(
        "unique for",
        null=True,
        blank=True,
        help_text="How long the id stays taken after its message succeeded.",
    )
    quiet_until = models.DateTimeField("quiet until", null=True, blank=True)
    put_aside = JSONColumn("put aside", null=True, blank=True)

    class Meta:
        verbose_name = "unique id"
        verbose_name_plural = "unique ids"
        db_table_comment = "One row is one unique id that is taken (django_mq)"
        default_permissions = ("view",)
        constraints = (
            # The id comes first, since `cancel()` may know nothing else.
            models.UniqueConstraint(
                name="mq_unique",
                fields=("unique_id", "type", "queue", "handler"),
                condition=Q(put_aside__isnull=True),
            ),
            models.UniqueConstraint(
                name="mq_unique_aside",
                fields=("unique_id", "type", "queue", "handler"),
                condition=Q(put_aside__isnull=False),
            ),
            # Few and short, like the constraints of messages: readers of `put_aside` tolerate bad
            # values.
            models.CheckConstraint(
                name="mq_unique_names",
                # A taken id has the names of its message, which have been checked; a second check
                # would take 2.5 us.
                condition=Q(put_aside__isnull=True)
                | Q(
                    queue__regex=NAME,
                    type__regex=NAME,
                    handler__regex=NAME_OR_EMPTY,
                    unique_id__regex=KEY,
                ),
            ),
            times_in_range("mq_unique_times", "quiet_until"),
            span_in_range("mq_unique_range", "unique_for"),
            has_json_type("mq_unique_aside_shape", put_aside="object"),
        )
        indexes = (
            models.Index(
                fields=("quiet_until",),
                name="mq_unique_quiet",
                condition=Q(quiet_until__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.unique_id} of {self.type} in {self.queue}"
