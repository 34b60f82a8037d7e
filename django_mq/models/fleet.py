"""Queues, as operators and workers have set them; the heartbeats of workers, and their commands."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_mq.models.base import StoredModel
from django_mq.models.columns import JSONColumn
from django_mq.models.constraints import has_json_type, times_in_range
from django_mq.policy.column_bounds import MAX_NAME, NAME

#: The range of threads and slots in use: no infinity, and nothing that is not a number.
USED = (0.0, 1_000_000.0)


class QueueState(StoredModel):
    """The state of one queue, as set by operators and workers. A queue needs no row.

    It is paused while `paused_at` is set and `paused_until` is null or in the future.
    """

    queue = models.CharField("queue", max_length=MAX_NAME, db_collation="C", primary_key=True)
    paused_at = models.DateTimeField("paused at", null=True, blank=True)
    paused_until = models.DateTimeField("paused until", null=True, blank=True)
    backoff_level = models.PositiveSmallIntegerField("backoff level", db_default=0)
    backoff_changed_at = models.DateTimeField("backoff changed at", null=True, blank=True)
    backoff_until = models.DateTimeField("backing off until", null=True, blank=True)
    probe_by = models.CharField(  # noqa: DJ001
        "probe by", max_length=64, db_collation="C", null=True, blank=True
    )
    probe_until = models.DateTimeField("probe until", null=True, blank=True)
    max_in_flight = models.PositiveIntegerField("max in flight", null=True, blank=True)
    owner = models.CharField(  # noqa: DJ001
        "owner", max_length=64, db_collation="C", null=True, blank=True
    )
    owned_until = models.DateTimeField("owned until", null=True, blank=True)
    warned_at = models.DateTimeField("warned at", null=True, blank=True)
    chores_ran_at = models.DateTimeField("chores ran at", null=True, blank=True)
    chores_resume = models.JSONField("chore positions", null=True, blank=True)

    class Meta:
        verbose_name = "queue"
        verbose_name_plural = "queues"
        db_table_comment = "One row is the state of one queue (django_mq)"
        default_permissions = ("view",)
        permissions = (("change_queue", "Can pause, resume and limit a queue"),)
        constraints = (
            models.CheckConstraint(
                name="mq_state_queue_name",
                condition=Q(queue__regex=NAME, owner__regex=NAME, probe_by__regex=NAME),
            ),
            times_in_range(
                "mq_state_times",
                "paused_at",
                "paused_until",
                "backoff_changed_at",
                "backoff_until",
                "probe_until",
                "owned_until",
                "warned_at",
                "chores_ran_at",
            ),
        )

    def __str__(self) -> str:
        return self.queue


class WorkerHeartbeat(StoredModel):
    """One worker process, as of its last heartbeat."""

    id = models.CharField("worker", max_length=32, db_collation="C", primary_key=True)
    queues = JSONColumn("queues")
    host = models.CharField("host", max_length=255)
    pid = models.PositiveIntegerField("process id")
    version = models.CharField("version", max_length=32)
    wakeup = models.CharField(
        "wakeup", max_length=16, help_text="notify, poll, or degraded (cannot LISTEN, so it polls)."
    )
    draining = models.BooleanField("draining", db_default=False)
    quiet = models.BooleanField(
        "quiet", db_default=False, help_text="An operator told it to claim no more messages."
    )
    running = JSONColumn(
        "running", help_text="Ids of the messages that it was running at its last heartbeat."
    )
    timings = JSONColumn(
        "timings",
        db_default=models.Value({}, models.JSONField()),
        help_text="Per handler: numbers of attempts, and histograms of their waits and run times.",
    )
    # Also, with 0, the messages whose leases it could not renew: see `store/claim_lapsed.py`.
    ran = JSONColumn(
        "run times",
        db_default=models.Value({}, models.JSONField()),
        help_text="By message id: the seconds that it had run at the last heartbeat.",
    )
    sessions = JSONColumn(
        "sessions",
        db_default=models.Value([], models.JSONField()),
        help_text="Server sessions that run messages of ordered queues: process id and start.",
    )
    threads = models.PositiveIntegerField("threads", null=True, blank=True)
    threads_used = models.FloatField(
        "threads in use",
        null=True,
        blank=True,
        help_text="On average, since the heartbeat before.",
    )
    slots = models.PositiveIntegerField(
        "slots", null=True, blank=True, help_text="For messages of async handlers."
    )
    slots_used = models.FloatField(
        "slots in use",
        null=True,
        blank=True,
        help_text="On average, since the heartbeat before.",
    )
    started_at = models.DateTimeField("started at", db_default=Now())
    last_seen = models.DateTimeField("last seen", db_default=Now())

    class Meta:
        verbose_name = "worker"
        verbose_name_plural = "workers"
        db_table_comment = "One row is one worker process (django_mq)"
        default_permissions = ("view",)
        permissions = (("stop_worker", "Can quiet, resume and stop a worker"),)
        constraints = (
            models.CheckConstraint(name="mq_worker_name", condition=Q(id__regex=NAME)),
            times_in_range("mq_worker_times", "started_at", "last_seen"),
            has_json_type(
                "mq_worker_json",
                queues="array",
                running="array",
                timings="object",
                ran="object",
                sessions="array",
            ),
            models.CheckConstraint(
                name="mq_worker_usage",
                condition=Q(threads_used__range=USED, slots_used__range=USED),
            ),
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class WorkerCommand(StoredModel):
    """A command to a worker: about a message that it runs, with its answer, or about itself.

    A command without a message is about the worker. Rows are removed after an hour.
    """

    class CommandAction(models.TextChoices):
        """The commands that a worker carries out."""

        STOP = "stop", "stop"
        STACK = "stack", "stack"
        QUIET = "quiet", "quiet"
        RESUME = "resume", "resume"
        LEAVE = "leave", "leave"

    id = models.BigAutoField(primary_key=True)
    worker = models.CharField("worker", max_length=32, db_collation="C")
    message_id = models.BigIntegerField("message", null=True, blank=True)
    attempt = models.PositiveIntegerField("attempt", null=True, blank=True)
    action = models.CharField("action", max_length=16, choices=CommandAction)
    asked_by = models.TextField("requested by", blank=True, db_default="")
    asked_at = models.DateTimeField("requested at", db_default=Now())
    taken_at = models.DateTimeField("taken at", null=True, blank=True)
    answered_at = models.DateTimeField("answered at", null=True, blank=True)
    answer = models.TextField("answer", blank=True, db_default="")

    class Meta:
        verbose_name = "worker command"
        verbose_name_plural = "worker commands"
        db_table_comment = "One row is one command to a worker (django_mq)"
        default_permissions = ()
        constraints = (
            models.CheckConstraint(
                name="mq_command_names",
                condition=Q(
                    worker__regex=NAME, action__in=("stop", "stack", "quiet", "resume", "leave")
                ),
            ),
            models.CheckConstraint(
                name="mq_command_subject",
                condition=Q(
                    action__in=("stop", "stack"), message_id__isnull=False, attempt__isnull=False
                )
                | Q(
                    action__in=("quiet", "resume", "leave"),
                    message_id__isnull=True,
                    attempt__isnull=True,
                ),
            ),
            times_in_range("mq_command_times", "asked_at", "taken_at", "answered_at"),
        )
        indexes = (
            models.Index(
                fields=("worker",), name="mq_command_open", condition=Q(taken_at__isnull=True)
            ),
            models.Index(fields=("message_id",), name="mq_command_message"),
        )

    def __str__(self) -> str:
        about = "worker" if self.message_id is None else f"message {self.message_id} of"
        return f"{self.action} {about} {self.worker}"
