"""Schedules that are overdue or cannot be broadcast."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from django_mq.conf import command_on
from django_mq.conf.local_time import aware
from django_mq.exceptions import InvalidOption
from django_mq.handlers.cron import times_of
from django_mq.models import Schedule
from django_mq.policy.durations import span
from django_mq.queues.doctor.findings import Finding, short_cursor
from django_mq.queues.fleet import workers
from django_mq.queues.scheduling import overdue

#: The maximum numbers of schedules that are read, that are named, and of failures reported.
MAX_READ, MAX_NAMED, MAX_FAILURES = 1000, 3, 20


def late_schedules(alias: str) -> Iterator[Finding]:
    """D018: a schedule is overdue, and not because its last broadcast failed (D019)."""
    due = _enabled(alias).filter(last_error="", next_at__lt=Now()).order_by("next_at", "name")
    with short_cursor(alias):
        found = [each for each in due[:MAX_READ] if overdue(each)]
        alive = any(each.alive for each in workers(using=alias))
    if not found:
        return
    yield Finding(
        id="D018",
        level="error" if any(map(_misses_a_period, found)) else "warning",
        text=_overdue(found),
        hint="Workers are alive, so look in their log for errors of the thread mq-scheduler. Cron"
        " expressions need the extra periodic on the workers' machines. Disable a schedule that the"
        " code no longer declares: mq_schedule disable NAME."
        if alive
        else "Start a worker whose code declares it, whatever its queues.",
    )


def _overdue(found: list[Schedule]) -> str:
    longest = span(overdue(found[0]))
    if len(found) == 1:
        return f"The schedule {found[0].name} is {longest} overdue."
    names = ", ".join(each.name for each in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{len(found)} schedules are overdue, by up to {longest}: {names}{more}."


def _misses_a_period(schedule: Schedule) -> bool:
    """Return whether the next time after the overdue one has passed, too."""
    if schedule.next_at is None:
        return False
    at = aware(schedule.next_at)
    try:
        following = times_of(schedule.cron, schedule.every, schedule.tz, start=at).after(at)
    except InvalidOption:
        return False  # not readable here, but perhaps on workers
    return any(each - at <= overdue(schedule) for each in islice(following, 1))


def failing_schedules(alias: str) -> Iterator[Finding]:
    """D019: the last broadcast of a schedule failed."""
    with short_cursor(alias):
        found = list(_enabled(alias).filter(~Q(last_error="")).order_by("name")[:MAX_FAILURES])
    for each in found:
        late = overdue(each)
        text = f"The last broadcast of the schedule {each.name} failed: {each.last_error}."
        if each.next_at is None:
            text += " It has no next time."
        elif late:
            text += f" Its time stays due: it is {span(late)} overdue."
        yield Finding(
            id="D019",
            level="error" if late or each.next_at is None else "warning",
            text=text,
            hint="Correct it, then enable it again: manage.py"
            f" {command_on(alias, f'mq_schedule enable {each.name}')}."
            if each.next_at is None
            else "Correct what the error names; manage.py"
            f" {command_on(alias, f'mq_schedule run {each.name}')} broadcasts it at once.",
        )


def _enabled(alias: str) -> QuerySet[Schedule]:
    rows = Schedule.objects.using(alias).filter(enabled=True).annotate(now=Now())
    return rows.defer("payload", "metadata")
