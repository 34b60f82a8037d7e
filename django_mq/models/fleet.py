"""The state of queues, as set by operators and workers, and the heartbeats of workers."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_mq.models.constraints import has_json_type, times_are_times
from django_mq.models.json_column import JSONColumn
from django_mq.policy.column_bounds import NAME, NAME_LENGTH


class QueueState(models.Model):
    """The state of one queue, as set by operators and workers. A queue needs no row.

    It is paused while `paused_at` is set and `paused_until` is null or in the future.
    """

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH, db_collation="C", primary_key=True)
    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)
    paused_until = models.DateTimeField(_("paused until"), null=True, blank=True)
    backoff_level = models.PositiveSmallIntegerField(_("backoff level"), db_default=0)
    backoff_changed_at = models.DateTimeField(_("backoff changed at"), null=True, blank=True)
    backoff_until = models.DateTimeField(_("backing off until"), null=True, blank=True)
    probe_by = models.CharField(  # noqa: DJ001
        _("probe by"), max_length=64, db_collation="C", null=True, blank=True
    )
    probe_until = models.DateTimeField(_("probe until"), null=True, blank=True)
    max_in_flight = models.PositiveIntegerField(_("in flight at most"), null=True, blank=True)
    owner = models.CharField(  # noqa: DJ001
        _("owner"), max_length=64, db_collation="C", null=True, blank=True
    )
    owned_until = models.DateTimeField(_("owned until"), null=True, blank=True)
    warned_at = models.DateTimeField(_("warned at"), null=True, blank=True)
    chores_ran_at = models.DateTimeField(_("chores ran at"), null=True, blank=True)
    chores_resume = models.JSONField(_("chores resume at"), null=True, blank=True)

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        db_table_comment = "What was decided about one queue (django_mq)"
        default_permissions = ("view",)
        permissions = (("change_queue", _("Can pause, resume and limit a queue")),)
        constraints = (
            models.CheckConstraint(
                name="mq_state_queue_name",
                condition=Q(queue__regex=NAME, owner__regex=NAME, probe_by__regex=NAME),
            ),
            times_are_times(
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


class WorkerHeartbeat(models.Model):
    """One worker process, as of its last heartbeat."""

    id = models.CharField(_("worker"), max_length=32, db_collation="C", primary_key=True)
    queues = JSONColumn(_("queues"))
    host = models.CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process"))
    version = models.CharField(_("version"), max_length=32)
    wakeup = models.CharField(
        _("woken by"), max_length=16, help_text=_("notify, poll, or degraded (LISTEN is dead).")
    )
    draining = models.BooleanField(_("draining"), db_default=False)
    running = JSONColumn(
        _("running"), help_text=_("Ids of the messages whose handlers ran at the last beat.")
    )
    timings = JSONColumn(
        _("timings"),
        db_default=models.Value({}, models.JSONField()),
        help_text=_("By handler: how many attempts, how long they waited and ran."),
    )
    sessions = JSONColumn(
        _("sessions"),
        db_default=models.Value([], models.JSONField()),
        help_text=_("Server sessions that run messages of ordered queues: process id and start."),
    )
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    last_seen = models.DateTimeField(_("last seen"), db_default=Now())

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        db_table_comment = "One row is one worker process (django_mq)"
        default_permissions = ("view",)
        constraints = (
            models.CheckConstraint(name="mq_worker_name", condition=Q(id__regex=NAME)),
            times_are_times("mq_worker_times", "started_at", "last_seen"),
            has_json_type(
                "mq_worker_json",
                queues="array",
                running="array",
                timings="object",
                sessions="array",
            ),
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"
