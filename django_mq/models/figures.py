"""The figures of handlers over time: by minute and worker, and added up by hour."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import BooleanField, CheckConstraint, F, Func, Q
from django.db.models.functions import Greatest
from django.db.models.lookups import LessThanOrEqual

from django_mq.models.base import StoredModel
from django_mq.models.columns import JSONColumn
from django_mq.models.constraints import times_in_range
from django_mq.policy.column_bounds import MAX_FIGURE, MAX_NAME, NAME, NAME_OR_EMPTY

_COUNTS = ("acked", "failed", "retried", "dead", "broadcast")
_IS_HISTOGRAM = (
    "jsonb_typeof(%(expressions)s) = 'object' and not jsonb_path_exists(%(expressions)s,"
    """ '$.keyvalue() ? (!(@.key like_regex "^[0-9]{1,3}$") || @.value.type() != "number\""""
    f" || @.value < 0 || @.value > {MAX_FIGURE})')"
)


def _name(label: Any, **options: Any) -> Any:
    return models.CharField(label, max_length=MAX_NAME, db_collation="C", **options)


def _count(label: Any) -> Any:
    return models.PositiveBigIntegerField(label, db_default=0)


def _histogram(label: Any) -> Any:
    return JSONColumn(label, db_default=models.Value({}, models.JSONField()))


def _can_be_added_up(name: str) -> CheckConstraint:
    """Return a CHECK that the counts are small enough, and that histograms are counts by bucket."""
    condition = Q(LessThanOrEqual(Greatest(*_COUNTS), MAX_FIGURE))
    for column in ("waited", "ran"):
        condition &= Q(Func(F(column), template=_IS_HISTOGRAM, output_field=BooleanField()))
    return CheckConstraint(name=name, condition=condition)


class HandlerFigures(StoredModel):
    """Counts of one handler in one queue; both names are empty for messages that have none here.

    `waited` and `ran` are histograms of seconds: counts by the number of a bucket, as in
    `django_mq.policy.histogram`. `broadcast` counts messages by the time of their creation, once
    their first attempt has ended; a message older than an hour counts when that attempt ends.
    """

    id = models.BigAutoField(primary_key=True)
    queue = _name("queue", blank=True)
    handler = _name("handler", blank=True)
    acked = _count("acked")
    failed = _count("failed")
    retried = _count("retried")
    dead = _count("dead")
    broadcast = _count("broadcast")
    waited = _histogram("waited")
    ran = _histogram("ran")

    class Meta:
        abstract = True


class MinuteFigures(HandlerFigures):
    """The figures of one worker in one minute; it rewrites a row until the figures are final."""

    minute = models.DateTimeField("minute")
    worker = models.CharField("worker", max_length=32, db_collation="C")

    class Meta:
        verbose_name = "figures per minute"
        verbose_name_plural = "figures per minute"
        db_table_comment = (
            "The figures of one worker in one minute, by queue and handler (django_mq)"
        )
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                fields=("minute", "worker", "queue", "handler"), name="mq_minute_unique"
            ),
            models.CheckConstraint(
                name="mq_minute_names",
                condition=Q(
                    worker__regex=NAME, queue__regex=NAME_OR_EMPTY, handler__regex=NAME_OR_EMPTY
                ),
            ),
            times_in_range("mq_minute_times", "minute"),
            _can_be_added_up("mq_minute_figures"),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.handler} at {self.minute}"


class HourFigures(HandlerFigures):
    """The figures of all workers in one hour, added up once its minutes are final."""

    hour = models.DateTimeField("hour")

    class Meta:
        verbose_name = "figures per hour"
        verbose_name_plural = "figures per hour"
        db_table_comment = "The figures of the fleet in one hour, by queue and handler (django_mq)"
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("hour", "queue", "handler"), name="mq_hour_unique"),
            models.CheckConstraint(
                name="mq_hour_names",
                condition=Q(queue__regex=NAME_OR_EMPTY, handler__regex=NAME_OR_EMPTY),
            ),
            times_in_range("mq_hour_times", "hour"),
            _can_be_added_up("mq_hour_figures"),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.handler} at {self.hour}"


class Overview(MinuteFigures):
    """The page `admin/<app>/overview/`: the admin derives addresses from models."""

    class Meta:
        proxy = True
        verbose_name = "overview"
        verbose_name_plural = "overview"
        default_permissions = ()
