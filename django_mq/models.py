"""Tables, constraints and indexes. `store/` reads and writes them; people look at them here.

The store names tables and columns by itself; a test holds the two together. How the tables are
vacuumed is set by the migration that makes them: Django has no option for it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Greatest, Least, Now
from django.db.models.lookups import GreaterThanOrEqual, LessThanOrEqual
from django.utils.translation import gettext_lazy as _

from django_mq.states import MessageQuerySet, MessageState, read_state

# The one rule for names, as a CHECK: rows are also written by others than this library.
# The column's type holds the length: as {1,128} in the expression it costs 8.6 us a name, so 0.2.
NAME = r"^[A-Za-z0-9_.:/-]+$"
NAME_OR_EMPTY = r"^[A-Za-z0-9_.:/-]*$"
NAME_LENGTH = 128
# All of a message. Nulls are nobody's least or greatest.
_TIMES = (
    "created_at",
    "processable_after",
    "expires_at",
    "leased_until",
    "held_since",
    "dead_at",
)
FIRST_TIME, LAST_TIME = datetime(1900, 1, 1, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)


class QueuedMessage(models.Model):
    """One message for one subscriber: waiting, leased, blocked or dead.

    The row is gone when the message is acked, cancelled or purged.
    """

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    type = models.CharField(_("type"), max_length=NAME_LENGTH)
    schema_version = models.IntegerField(_("schema version"), db_default=1)
    payload = models.JSONField(_("payload"))
    metadata = models.JSONField(_("metadata"), db_default=models.Value({}, models.JSONField()))
    handler = models.CharField(
        _("handler"),
        max_length=NAME_LENGTH,
        blank=True,
        db_default="",
        help_text=_("Name of the handler whose copy this is; empty: routed at delivery."),
    )
    priority = models.SmallIntegerField(_("priority"), db_default=0)
    key = models.CharField(_("order key"), max_length=NAME_LENGTH, null=True, blank=True)  # noqa: DJ001
    processable_after = models.DateTimeField(_("processable after"), db_default=Now())
    leased_until = models.DateTimeField(_("leased until"), null=True, blank=True)
    claimed_by = models.CharField(  # noqa: DJ001
        _("claimed by"), max_length=64, null=True, blank=True
    )
    attempts = models.IntegerField(_("attempts"), db_default=0)
    max_attempts = models.IntegerField(_("attempts at most"), db_default=20)
    retry = models.JSONField(_("retry policy"), null=True, blank=True)
    expires_at = models.DateTimeField(_("expires at"), null=True, blank=True)
    blocked_by = models.BigIntegerField(_("blocked by"), null=True, blank=True)
    held_since = models.DateTimeField(_("held since"), null=True, blank=True)
    suspect = models.BooleanField(_("suspect"), db_default=False)
    unique_id = models.CharField(  # noqa: DJ001
        _("unique id"), max_length=NAME_LENGTH, null=True, blank=True
    )
    unique_for = models.DurationField(_("unique for"), null=True, blank=True)
    wants_result = models.BooleanField(_("wants a result"), db_default=False)
    ordered = models.BooleanField(
        _("in line"), db_default=False, help_text=_("One of the line of an ordered queue.")
    )
    last_error = models.TextField(_("last error"), blank=True, db_default="")
    dead_at = models.DateTimeField(_("dead at"), null=True, blank=True)
    dead_reason = models.TextField(_("dead because"), blank=True, db_default="")
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    objects = MessageQuerySet.as_manager()

    class Meta:
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        db_table_comment = "One row is one message for one subscriber (django_mq)"
        default_permissions = ("view",)
        permissions = (
            ("requeue_message", _("Can requeue a dead letter")),
            ("run_message", _("Can make a message run now")),
            ("cancel_message", _("Can cancel a waiting message")),
            ("discard_message", _("Can discard a dead letter")),
            ("view_payload", _("Can see payloads and error texts")),
        )
        # The server reads these anew for each statement that inserts or updates, 1.7 us for a
        # thousand characters of pg_constraint.conbin: so they are few and short.
        constraints = (
            models.CheckConstraint(name="mq_queue_name", condition=Q(queue__regex=NAME)),
            models.CheckConstraint(name="mq_type_name", condition=Q(type__regex=NAME)),
            models.CheckConstraint(
                name="mq_handler_name", condition=Q(handler__regex=NAME_OR_EMPTY)
            ),
            models.CheckConstraint(name="mq_key_name", condition=Q(key__regex=NAME)),
            models.CheckConstraint(name="mq_unique_id_name", condition=Q(unique_id__regex=NAME)),
            models.CheckConstraint(
                name="mq_priority_range", condition=Q(priority__range=(-100, 100))
            ),
            models.CheckConstraint(
                name="mq_schema_version_positive", condition=Q(schema_version__gte=1)
            ),
            # Neither infinite nor beyond what Python can read, and no attempt that overflows.
            models.CheckConstraint(
                name="mq_times_are_times",
                condition=Q(
                    GreaterThanOrEqual(Least(*_TIMES), FIRST_TIME),
                    LessThanOrEqual(Greatest(*_TIMES), LAST_TIME),
                ),
            ),
            models.CheckConstraint(
                name="mq_attempts_bounded",
                condition=Q(attempts__gte=0, attempts__lt=2**31 - 1, max_attempts__gte=0),
            ),
            # A lease and its claimer come and go together, and nothing dead is leased.
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
        """The state of this message: as annotated by `with_state()`, else asked for now."""
        return (
            MessageState(self.__dict__["state"]) if "state" in self.__dict__ else read_state(self)
        )

    @state.setter
    def state(self, value: str) -> None:
        self.__dict__["state"] = value


class FailedAttempt(models.Model):
    """One failed attempt. It outlives its message: a late success keeps its history."""

    id = models.BigAutoField(primary_key=True)
    message_id = models.BigIntegerField(_("message"))
    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    type = models.CharField(_("type"), max_length=NAME_LENGTH)
    handler = models.CharField(_("handler"), max_length=NAME_LENGTH, blank=True)
    attempt = models.PositiveIntegerField(_("attempt"))
    worker = models.CharField(_("worker"), max_length=64, blank=True)
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    ended_at = models.DateTimeField(_("ended at"), db_default=Now())
    error_class = models.TextField(_("error class"), blank=True)
    error_text = models.TextField(_("error text"), blank=True)
    traceback = models.TextField(_("traceback"), blank=True)

    class Meta:
        verbose_name = _("failed attempt")
        verbose_name_plural = _("failed attempts")
        db_table_comment = "One row is one failed attempt (django_mq)"
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=("message_id", "attempt"), name="mq_attempt_message"),
            models.Index(fields=("ended_at",), name="mq_attempt_ended"),
        )

    def __str__(self) -> str:
        return f"attempt {self.attempt} of message {self.message_id}"


class QueueState(models.Model):
    """What operators and the fleet decided about one queue; a queue without a row is normal.

    Paused while `paused_at` is set and `paused_until` is null or ahead.
    """

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH, primary_key=True)
    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)
    paused_until = models.DateTimeField(_("paused until"), null=True, blank=True)
    backoff_level = models.PositiveSmallIntegerField(_("backoff level"), db_default=0)
    backoff_changed_at = models.DateTimeField(_("backoff changed at"), null=True, blank=True)
    backoff_until = models.DateTimeField(_("backing off until"), null=True, blank=True)
    probe_by = models.CharField(_("probe by"), max_length=64, null=True, blank=True)  # noqa: DJ001
    probe_until = models.DateTimeField(_("probe until"), null=True, blank=True)
    max_in_flight = models.PositiveIntegerField(_("in flight at most"), null=True, blank=True)
    owner = models.CharField(_("owner"), max_length=64, null=True, blank=True)  # noqa: DJ001
    owned_until = models.DateTimeField(_("owned until"), null=True, blank=True)
    warned_at = models.DateTimeField(_("warned at"), null=True, blank=True)
    chores_ran_at = models.DateTimeField(_("chores ran at"), null=True, blank=True)

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        db_table_comment = "What was decided about one queue (django_mq)"
        default_permissions = ("view",)
        permissions = (("change_queue", _("Can pause, resume and limit a queue")),)
        constraints = (
            models.CheckConstraint(name="mq_state_queue_name", condition=Q(queue__regex=NAME)),
        )

    def __str__(self) -> str:
        return self.queue


class Result(models.Model):
    """What a handler returned, or how it failed for good, where somebody asked."""

    message_id = models.BigIntegerField(_("message"), primary_key=True)
    handler = models.CharField(_("handler"), max_length=NAME_LENGTH, blank=True)
    value = models.JSONField(_("value"), null=True)
    error_class = models.TextField(_("error class"), blank=True, db_default="")
    error_text = models.TextField(_("error text"), blank=True, db_default="")
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    class Meta:
        verbose_name = _("result")
        verbose_name_plural = _("results")
        db_table_comment = "What a handler returned, where somebody asked (django_mq)"
        default_permissions = ("view",)
        indexes = (models.Index(fields=("created_at",), name="mq_result_created"),)

    def __str__(self) -> str:
        return f"result of message {self.message_id}"


class WorkerHeartbeat(models.Model):
    """One worker process, as it last spoke of itself."""

    id = models.CharField(_("worker"), max_length=32, primary_key=True)
    queues = models.JSONField(_("queues"))
    host = models.CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process"))
    version = models.CharField(_("version"), max_length=32)
    wakeup = models.CharField(
        _("woken by"), max_length=16, help_text=_("notify, poll, or degraded (LISTEN is dead).")
    )
    draining = models.BooleanField(_("draining"), db_default=False)
    running = models.JSONField(
        _("running"), help_text=_("Ids of the messages whose handlers ran at the last beat.")
    )
    timings = models.JSONField(
        _("timings"),
        db_default=models.Value({}, models.JSONField()),
        help_text=_("By handler: how many attempts, how long they waited and ran."),
    )
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    last_seen = models.DateTimeField(_("last seen"), db_default=Now())

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        db_table_comment = "One row is one worker process (django_mq)"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class UniqueKey(models.Model):
    """A unique id that is taken: by which message, or until when. Or what is put aside for it.

    What is put aside has a row of its own, so that a worker that ends the message never waits
    for a transaction that puts another one aside. Whether a message still has its id is a
    question to its row: who deletes that by hand frees the id.
    """

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    handler = models.CharField(_("handler"), max_length=NAME_LENGTH, blank=True, db_default="")
    type = models.CharField(_("type"), max_length=NAME_LENGTH)
    unique_id = models.CharField(_("unique id"), max_length=NAME_LENGTH)
    message_id = models.BigIntegerField(_("message"), null=True, blank=True)
    unique_for = models.DurationField(
        _("unique for"),
        null=True,
        blank=True,
        help_text=_("How long it stays taken once its message is handled."),
    )
    quiet_until = models.DateTimeField(_("quiet until"), null=True, blank=True)
    put_aside = models.JSONField(_("put aside"), null=True, blank=True)

    class Meta:
        verbose_name = _("unique id")
        verbose_name_plural = _("unique ids")
        db_table_comment = "One row is one unique id that is taken (django_mq)"
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(
                name="mq_unique",
                fields=("queue", "handler", "type", "unique_id"),
                condition=Q(put_aside__isnull=True),
            ),
            models.UniqueConstraint(
                name="mq_unique_aside",
                fields=("queue", "handler", "type", "unique_id"),
                condition=Q(put_aside__isnull=False),
            ),
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
