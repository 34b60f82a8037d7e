"""Inspect, run, enable and disable schedules.

Functions that take a name raise ValueError if there is no such schedule, and OperationalError when
another session keeps its row locked for a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import islice

from django.db import connections
from django.db.models.functions import Now

from django_mq.conf import alias_of, get_settings
from django_mq.handlers.cron import in_words, times_of
from django_mq.messages import Receipt
from django_mq.models import Schedule
from django_mq.outbox.schedules.firing import fire_now
from django_mq.policy.due_times import GRACE
from django_mq.policy.names import check_name
from django_mq.policy.similar_names import similar
from django_mq.queues.arguments import whole_number
from django_mq.queues.transactions import after_commit, writing
from django_mq.store import Cursor
from django_mq.store import schedules as schedules_store
from django_mq.store.schedules import ScheduleRow

logger = logging.getLogger("django_mq")

#: The maximum number of times that `next_times()` returns.
MAX_TIMES = 1000


def schedules(*, using: str | None = None) -> list[Schedule]:
    """Return all schedules by name, whether enabled or not."""
    return list(Schedule.objects.using(alias_of(using)).annotate(now=Now()).order_by("name"))


def no_schedule(name: str, known: Iterable[str]) -> str:
    """Return the error for a name that is not in `known`, with similar names.

    >>> no_schedule("hurly", ["hourly", "daily"])
    'there is no schedule hurly: did you mean hourly?'
    >>> no_schedule("tick", ["shop.handlers.tick"])
    'there is no schedule tick: did you mean shop.handlers.tick?'
    >>> no_schedule("x", [])
    'there is no schedule x: mq_schedule lists those that workers stored'
    """
    names = list(known)
    # The schedule of a handler has the full path of its function; people remember the end.
    near = [each for each in names if each.endswith(f".{name}")][:3]
    near = near or similar(name, names)
    advice = (
        f"did you mean {' or '.join(near)}?"
        if near
        else "mq_schedule lists those that workers stored"
    )
    return f"there is no schedule {name}: {advice}"


def state_of(schedule: Schedule) -> str:
    """Return the state of a schedule in a word, the same for commands and the admin.

    disabled; overdue: its time has passed, but no worker has broadcast it; failed: its last
    broadcast was an error; over: no time is left; enabled. `schedule` is annotated with `now`.
    """
    if not schedule.enabled:
        return "disabled"
    if overdue(schedule):
        return "overdue"
    if schedule.last_error:
        return "failed"
    return "over" if schedule.next_at is None else "enabled"


def overdue(schedule: Schedule) -> timedelta:
    """Return how late a schedule's next time is; zero unless it counts as missed.

    As for `catch_up`, a time is missed a minute after a worker should have broadcast it. `schedule`
    is annotated with `now`, the time of the database.
    """
    if schedule.next_at is None:
        return timedelta(0)
    late: timedelta = schedule.now - schedule.next_at  # type: ignore[attr-defined]
    missed = GRACE + timedelta(seconds=get_settings().poll_interval)
    return late if late > missed else timedelta(0)


def timing_of(schedule: Schedule) -> str:
    """Return the times of a schedule in words, the same for commands and the admin."""
    return in_words(schedule.cron, schedule.every, schedule.tz)


def next_times(
    schedule: str | Schedule, count: int = 3, *, using: str | None = None
) -> list[datetime]:
    """Return the next `count` times of a schedule in UTC, as they would be if it is enabled.

    Raises InvalidOption if its cron expression or time zone cannot be read.
    """
    whole_number(count, "count", maximum=MAX_TIMES)
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    check_name(name, "schedule name")
    with connections[alias_of(using)].cursor() as cursor:
        row = schedules_store.read(cursor, name)
        if row is None:
            raise ValueError(no_schedule(name, schedules_store.names(cursor)))
    times = times_of(row.cron, row.every, row.tz, start=row.due_at)
    if row.next_at is None:
        return list(islice(times.after(row.now), count))
    return [row.next_at, *islice(times.after(row.next_at), count - 1)]


def run_schedule(name: str, *, using: str | None = None) -> Receipt:
    """Broadcast the message of a schedule now, enabled or not; its next time stays.

    The receipt is false if the schedule has `overlap="skip"` and its last message still waits or
    runs. Raises the errors of `broadcast()`.
    """
    check_name(name, "schedule name")
    alias = alias_of(using)
    with writing(alias) as cursor:
        receipt = fire_now(cursor, alias, _take(cursor, name))
    if receipt:
        _log(alias, name, "run", "schedule_run")
    return receipt


def enable_schedule(name: str, *, using: str | None = None) -> bool:
    """Enable a schedule, whatever the code says; return whether it was disabled.

    It continues with its next time from now on; missed times stay missed. A schedule that no
    process declares any longer is disabled again after 24 hours. Raises InvalidOption if its cron
    expression or time zone cannot be read.
    """
    check_name(name, "schedule name")
    alias = alias_of(using)
    with writing(alias) as cursor:
        row = _take(cursor, name)
        was_off = row.next_at is None
        next_at = row.next_at or _next(row)
        schedules_store.decide(cursor, name, enabled=True, next_at=next_at)
    _log(alias, name, "enabled", "schedule_enabled")
    return was_off


def disable_schedule(name: str, *, using: str | None = None) -> bool:
    """Disable a schedule, whatever the code says; return whether it was enabled.

    Messages that it has broadcast stay.
    """
    check_name(name, "schedule name")
    alias = alias_of(using)
    with writing(alias) as cursor:
        row = _take(cursor, name)
        schedules_store.decide(cursor, name, enabled=False, next_at=None)
    _log(alias, name, "disabled", "schedule_disabled")
    return row.enabled


def restart_schedule(name: str, *, enabled: bool, using: str | None = None) -> None:
    """Enable or disable a schedule whose timing has changed, and compute its next time again."""
    with writing(alias_of(using)) as cursor:
        row = _take(cursor, name)
        schedules_store.decide(
            cursor, name, enabled=enabled, next_at=_next(row) if enabled else None
        )


def _next(row: ScheduleRow) -> datetime | None:
    return next(times_of(row.cron, row.every, row.tz, start=row.now).after(row.now), None)


def _take(cursor: Cursor, name: str) -> ScheduleRow:
    row = schedules_store.take(cursor, name)
    if row is None:
        raise ValueError(no_schedule(name, schedules_store.names(cursor)))
    return row


def _log(alias: str, name: str, outcome: str, event: str) -> None:
    extra = {"event": event, "schedule": name}
    after_commit(alias, lambda: logger.info("schedule %s %s", name, outcome, extra=extra))
