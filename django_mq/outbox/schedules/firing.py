"""Broadcast the messages of schedules, in the transaction that moves each to its next time."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple

from django.db import connections, transaction

from django_mq.conf import get_settings
from django_mq.exceptions import BroadcastBusy
from django_mq.handlers.cron import UnknownZone, can_read_cron, times_of
from django_mq.messages import Message, Receipt
from django_mq.outbox.schedules.declaring import own_types
from django_mq.outbox.send import send
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.policy.due_times import GRACE, DueTimes, Times, due
from django_mq.policy.error_text import describe
from django_mq.policy.plain_text import one_line
from django_mq.store import Cursor, schedules
from django_mq.store.schedules import ScheduleRow
from django_mq.store.server_errors import LOST

logger = logging.getLogger("django_mq")

#: Broadcasts per transaction: each opens up to two savepoints, and PostgreSQL keeps only 64 per
#: transaction in shared memory.
MAX_PER_TRANSACTION = 30
#: The reserved metadata of a schedule's messages.
SCHEDULE, SCHEDULED_FOR = "mq.schedule", "mq.scheduled_for"


class FireResult(NamedTuple):
    """The result of one transaction: the number of broadcasts, and where the next one resumes.

    `after` is None if nothing more is due.
    """

    broadcasts: int
    after: schedules.Position | None


def fire_due(
    cursor: Cursor, alias: str, *, after: schedules.Position = schedules.FIRST
) -> FireResult:
    """Broadcast schedules due after position `after`; call it in a transaction of its own.

    A schedule that another session has locked is skipped, and so is one with a cron expression if
    `cronsim` is missing. So is one of other code: this process would route its message without the
    handlers of that code. A schedule whose broadcast fails moves on, with `last_error`. A schedule
    whose queue is full stays due, and so does one whose time zone this host does not know.
    """
    rows = schedules.take_due(
        cursor, limit=MAX_PER_TRANSACTION, after=after, cron=can_read_cron(), own=own_types()
    )
    tried = broadcasts = 0
    for row in rows:
        fired = _fire(cursor, alias, row, maximum=MAX_PER_TRANSACTION - tried)
        tried += fired.tried
        broadcasts += fired.broadcasts
        after = (row.due_at, row.name)
        if tried >= MAX_PER_TRANSACTION:
            return FireResult(broadcasts, after)
    return FireResult(broadcasts, after if len(rows) == MAX_PER_TRANSACTION else None)


def _fire(cursor: Cursor, alias: str, row: ScheduleRow, *, maximum: int) -> _FiredTimes:
    """Broadcast at most `maximum` times of a due schedule, and move the schedule on."""
    try:
        found = _due(row)
    except UnknownZone as error:  # it stays due, for a host that knows its zone
        _report_once(row, error)
        schedules.move(cursor, row.name, next_at=row.next_at, last_error=_text(error))
        return _FiredTimes(row.next_at)
    except Exception as error:  # another program wrote bad values
        _report(row, error)
        schedules.move(cursor, row.name, next_at=None, last_error=_text(error))
        return _FiredTimes(None)
    next_at = found.next_at if len(found.times) <= maximum else found.times[maximum]
    fired = _broadcast_each(row, found.times[:maximum], next_at, alias)
    schedules.move(
        cursor,
        row.name,
        next_at=fired.next_at,
        last_at=fired.last_at,
        last_message=fired.last_message,
        last_error=fired.last_error,
    )
    return fired


def _due(row: ScheduleRow) -> DueTimes:
    late = GRACE + timedelta(seconds=get_settings().poll_interval)
    catch_up = row.catch_up
    if catch_up == "all" and row.overlap == "skip":
        # The oldest missed time would be broadcast, and its message would skip all later ones.
        catch_up = "once"  # the latest
    return due(_times(row), next_at=row.due_at, now=row.now, catch_up=catch_up, late=late)


@dataclass(slots=True)
class _FiredTimes:
    """The outcome of the times of a schedule, and its next time."""

    next_at: datetime | None
    last_at: datetime | None = None
    last_message: int | None = None
    last_error: str = ""
    tried: int = 0
    broadcasts: int = 0


def _broadcast_each(
    row: ScheduleRow, times: Sequence[datetime], next_at: datetime | None, alias: str
) -> _FiredTimes:
    """Broadcast these times in order; if the queue has no room for one, it stays the next time."""
    fired = _FiredTimes(next_at)
    for at in times:
        fired.tried += 1
        try:
            receipt = broadcast_at(row, at, alias=alias)
        except Exception as error:
            driver = connections[alias].connection
            if driver is None or driver.closed:
                raise
            fired.last_error = _text(error)
            if isinstance(error, (BroadcastBusy, *LOST)):
                _report_once(row, error)
                fired.next_at = at
                return fired
            _report(row, error)
            continue
        fired.last_error = ""
        if receipt:
            fired.last_at, fired.last_message = at, first_id(receipt)
            fired.broadcasts += 1
            _log(logging.DEBUG, row, f"broadcast {at.isoformat()}", "schedule_fired")
        else:
            text = f"skipped {at.isoformat()}: its last message still waits or runs"
            _log(logging.INFO, row, text, "schedule_skipped")
    return fired


def broadcast_at(row: ScheduleRow, at: datetime, *, alias: str) -> Receipt:
    """Broadcast a schedule's message for the time `at`, in a savepoint.

    The receipt is false if `overlap="skip"` stored nothing. Raises the errors of `broadcast()`.
    """
    with transaction.atomic(using=alias):
        return _send(row, at, alias)


def _send(row: ScheduleRow, at: datetime, alias: str) -> Receipt:
    skips = row.overlap == "skip"
    message = Message(
        row.type,
        json.loads(row.payload),
        queue=row.queue or None,
        metadata=json.loads(row.metadata) or None,
        expires=row.expires,
        unique_id=_unique_id(row.name) if skips else None,
    )
    reserved = json.dumps({SCHEDULE: row.name, SCHEDULED_FOR: at.isoformat()})
    return send(message, using=alias, reserved=reserved)


def fire_now(cursor: Cursor, alias: str, row: ScheduleRow) -> Receipt:
    """Broadcast a schedule's message at once; its next time stays. Raises like `broadcast()`."""
    receipt = broadcast_at(row, row.now, alias=alias)
    if receipt:
        schedules.move(
            cursor,
            row.name,
            next_at=row.next_at,
            last_at=row.now,
            last_message=first_id(receipt),
        )
    return receipt


def fire_until(cursor: Cursor, alias: str, until: datetime, *, schedule: str | None) -> int:
    """Broadcast each time up to `until`, in order, as if it had come; return how many messages.

    For tests. `schedule` names the only one that moves. Each moves once, at the end: the versions
    of its row that a transaction leaves behind would slow down every later search. Raises the
    errors of `broadcast()`.
    """
    taken = schedules.take_due(cursor, limit=None, until=until)
    rows = {row.name: row for row in taken if schedule in (None, row.name)}
    count = 0
    last: dict[str, tuple[datetime, int | None]] = {}
    for at, name in heapq.merge(*(_times_until(row, until) for row in rows.values())):
        if receipt := _send(rows[name], at, alias):
            count += len(receipt.ids)
            last[name] = at, first_id(receipt)
    for name, row in rows.items():
        last_at, last_message = last.get(name, (None, None))
        next_at = next(_times(row).after(until), None)
        schedules.move(cursor, name, next_at=next_at, last_at=last_at, last_message=last_message)
    return count


def _times_until(row: ScheduleRow, until: datetime) -> Iterator[tuple[datetime, str]]:
    for at in chain([row.due_at], _times(row).after(row.due_at)):
        if at > until:
            return
        yield at, row.name


def _times(row: ScheduleRow) -> Times:
    return times_of(row.cron, row.every, row.tz, start=row.due_at)


def first_id(receipt: Receipt) -> int | None:
    """Return the id of the first copy that was stored; None if none was."""
    return next(iter(receipt.ids), None)


def _unique_id(name: str) -> str:
    """Return the unique id of a schedule's messages; a long name is shortened to its hash.

    >>> _unique_id("daily-report"), len(_unique_id("x" * 128)) <= MAX_NAME
    ('mq.schedule:daily-report', True)
    """
    found = f"{SCHEDULE}:{name}"
    if len(found) <= MAX_NAME:
        return found
    return f"{SCHEDULE}:{hashlib.sha256(name.encode()).hexdigest()}"


def _text(error: Exception) -> str:
    """Return the error's class and its first line: the other lines of PostgreSQL quote rows."""
    found = describe(error)
    return one_line(": ".join([found.error_class, *found.text.splitlines()[:1]]))


def _report(row: ScheduleRow, error: Exception) -> None:
    _log(logging.WARNING, row, f"could not be broadcast: {_text(error)}", "schedule_failed")


def _report_once(row: ScheduleRow, error: Exception) -> None:
    """Report why a schedule stays due, but not at each attempt."""
    if _text(error) != row.last_error:
        _report(row, error)


def _log(level: int, row: ScheduleRow, text: str, event: str) -> None:
    extra = {"event": event, "schedule": row.name, "type": row.type}
    logger.log(level, "schedule %s %s", row.name, text, extra=extra)
