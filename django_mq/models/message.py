"""The queue itself: a row is one message for one subscriber."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from django_mq.models.base import StoredModel
from django_mq.models.columns import DurationColumn, JSONColumn
from django_mq.models.constraints import span_in_range, times_in_range
from django_mq.policy.column_bounds import (
    KEY,
    MAX_INTEGER,
    MAX_NAME,
    MAX_PRIORITY,
    MIN_PRIORITY,
    NAME,
    NAME_OR_EMPTY,
)
from django_mq.policy.similar_names import similar
from django_mq.states import MessageState, read_state, state_expression
from django_mq.values import short_repr


class MessageQuerySet(models.QuerySet["QueuedMessage"]):
    """Queries for users; the statements of workers are in `store/`."""

    def with_state(self) -> MessageQuerySet:
        """Annotate each message with its `state`, computed by the database's clock."""
        return self.annotate(state=state_expression())  # type: ignore[no-redef]  # its own setter

    def in_state(self, *states: str) -> MessageQuerySet:
        """Keep the messages that are in one of `states`; ValueError if there is no such state."""
        for each in states:
            if each not in MessageState:
                near = similar(str(each), MessageState.values, most=1)
                advice = f": did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"no state is named {short_repr(each)}{advice}"
                    f" The states are {', '.join(MessageState.values)}"
                )
        return self.with_state().filter(state__in=states)  # type: ignore[misc]

    def waiting(self) -> MessageQuerySet:
        """Keep the messages that are neither leased nor dead: due, delayed, held or blocked."""
        return self.filter(leased_until__isnull=True, dead_at__isnull=True)

    def dead(self) -> MessageQuerySet:
        """Keep the dead letters."""
        return self.filter(dead_at__isnull=False)


class QueuedMessage(StoredModel):
    """One message for one subscriber: waiting, leased, blocked or dead.

    The row is deleted when the message is acked, cancelled or purged.
    """

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField("queue", max_length=MAX_NAME, db_collation="C")
    type = models.CharField("type", max_length=MAX_NAME, db_collation="C")
    schema_version = models.IntegerField("schema version", db_default=1)
    payload = JSONColumn("payload")
    metadata = JSONColumn("metadata", db_default=models.Value({}, models.JSONField()))
    handler = models.CharField(
        "handler",
        max_length=MAX_NAME,
        db_collation="C",
        blank=True,
        db_default="",
        help_text="Name of the handler that gets this copy; empty: routed at delivery.",
    )
    priority = models.SmallIntegerField("priority", db_default=0)
    key = models.CharField(  # noqa: DJ001
        "order key", max_length=MAX_NAME, db_collation="C", null=True, blank=True
    )
    processable_after = models.DateTimeField("processable after", db_default=Now())
    leased_until = models.DateTimeField("leased until", null=True, blank=True)
    claimed_by = models.CharField(  # noqa: DJ001
        "claimed by", max_length=64, db_collation="C", null=True, blank=True
    )
    unstarted_claim = models.CharField(  # noqa: DJ001
        "unstarted claim", max_length=64, db_collation="C", null=True, blank=True
    )
    attempts = models.IntegerField("attempts", db_default=0)
    max_attempts = models.IntegerField("max attempts", db_default=20)
    retry = JSONColumn("retry policy", null=True, blank=True)
    expires_at = models.DateTimeField("expires at", null=True, blank=True)
    blocked_by = models.BigIntegerField("blocked by", null=True, blank=True)
    held_since = models.DateTimeField("held since", null=True, blank=True)
    suspect = models.BooleanField("suspect", db_default=False)
    unique_id = models.CharField(  # noqa: DJ001
        "unique id", max_length=MAX_NAME, db_collation="C", null=True, blank=True
    )
    unique_for = DurationColumn("unique for", null=True, blank=True)
    wants_result = models.BooleanField("wants a result", db_default=False)
    ordered = models.BooleanField(
        "ordered", db_default=False, help_text="Whether it belongs to an ordered queue."
    )
    last_error = models.TextField("last error", blank=True, db_default="")
    dead_at = models.DateTimeField("dead at", null=True, blank=True)
    dead_reason = models.TextField("dead reason", blank=True, db_default="")
    created_at = models.DateTimeField("created at", db_default=Now())

    objects = MessageQuerySet.as_manager()

    class Meta:
        verbose_name = "message"
        verbose_name_plural = "messages"
        db_table_comment = "One row is one message for one subscriber (django_mq)"
        default_permissions = ("view",)
        permissions = (
            ("requeue_message", "Can requeue a dead letter"),
            ("run_message", "Can make a message run now"),
            ("cancel_message", "Can cancel a waiting message"),
            ("discard_message", "Can discard a dead letter"),
            ("view_payload", "Can see payloads and error texts"),
            ("export_message", "Can export messages"),
            ("stop_message", "Can stop a running message"),
            ("broadcast_message", "Can broadcast a message"),
            ("edit_message", "Can edit a waiting message"),
        )
        # The server parses these for each statement that inserts or updates, which takes 1.7 us per
        # thousand characters of pg_constraint.conbin, so they are few and short.
        constraints = (
            models.CheckConstraint(name="mq_queue_name", condition=Q(queue__regex=NAME)),
            models.CheckConstraint(name="mq_type_name", condition=Q(type__regex=NAME)),
            models.CheckConstraint(
                name="mq_handler_name", condition=Q(handler__regex=NAME_OR_EMPTY)
            ),
            models.CheckConstraint(name="mq_key_name", condition=Q(key__regex=KEY)),
            models.CheckConstraint(name="mq_unique_id_name", condition=Q(unique_id__regex=KEY)),
            models.CheckConstraint(
                name="mq_priority_range", condition=Q(priority__range=(MIN_PRIORITY, MAX_PRIORITY))
            ),
            models.CheckConstraint(
                name="mq_schema_version_positive", condition=Q(schema_version__gte=1)
            ),
            times_in_range(
                "mq_times_are_times",
                "created_at",
                "processable_after",
                "expires_at",
                "leased_until",
                "held_since",
                "dead_at",
            ),
            span_in_range("mq_unique_for_range", "unique_for"),
            # So that the claim can always add 1.
            models.CheckConstraint(
                name="mq_attempts_bounded",
                condition=Q(
                    attempts__gte=0,
                    attempts__lt=MAX_INTEGER,
                    max_attempts__gte=0,
                    max_attempts__lt=MAX_INTEGER,
                ),
            ),
            # A lease and its claimer are set and cleared together; a dead message has none. Nothing
            # checks whether the claimer is a name: that would take 2.5 us per row, a quarter of a
            # claim.
            models.CheckConstraint(
                name="mq_lease_has_claimer",
                condition=Q(leased_until__isnull=True, claimed_by__isnull=True)
                | Q(leased_until__isnull=False, claimed_by__isnull=False, dead_at__isnull=True),
            ),
        )
        indexes = (
            models.Index(
                F("queue"),
                F("priority").desc(),
                F("processable_after"),
                F("id"),
                name="mq_claim",
                condition=Q(
                    leased_until__isnull=True, blocked_by__isnull=True, dead_at__isnull=True
                ),
            ),
            models.Index(
                fields=("queue", "leased_until", "id"),
                name="mq_lease",
                condition=Q(leased_until__isnull=False),
            ),
            models.Index(
                fields=("queue", "handler", "key", "id"),
                name="mq_key",
                condition=Q(key__isnull=False),
            ),
            models.Index(
                fields=("queue", "handler", "key"),
                name="mq_key_leased",
                condition=Q(key__isnull=False, leased_until__isnull=False),
            ),
            models.Index(
                fields=("blocked_by",), name="mq_blocked", condition=Q(blocked_by__isnull=False)
            ),
            models.Index(fields=("queue", "id"), name="mq_line", condition=Q(ordered=True)),
            models.Index(
                fields=("queue", "dead_at", "id"),
                name="mq_dead",
                condition=Q(dead_at__isnull=False),
            ),
            models.Index(
                fields=("expires_at",),
                name="mq_expiry",
                condition=Q(expires_at__isnull=False, dead_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return f"{self.type} #{self.pk} in {self.queue}"

    @property
    def state(self) -> MessageState:
        """The state as annotated by `with_state()`, else read from the database now."""
        return (
            MessageState(self.__dict__["state"]) if "state" in self.__dict__ else read_state(self)
        )

    @state.setter
    def state(self, value: str) -> None:
        self.__dict__["state"] = value
