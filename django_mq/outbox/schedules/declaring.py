"""Store the schedules that this process declares, and retire those that no process declares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager

from django.db import DatabaseError, OperationalError
from psycopg.errors import LockNotAvailable

from django_mq.conf import Settings
from django_mq.exceptions import MQError
from django_mq.handlers import all_schedules
from django_mq.handlers.cron import times_of
from django_mq.handlers.periodic import check_type
from django_mq.handlers.registry import Declaration
from django_mq.policy.plain_text import one_line
from django_mq.store import Cursor, declared_schedules, schedules
from django_mq.store.server_errors import is_lost

logger = logging.getLogger("django_mq")

#: Seconds after which a process declares its schedules again, and after which a schedule that no
#: process has declared is disabled.
REDECLARE_INTERVAL, RETIRE_AFTER = 3600.0, 86400.0

#: Opens a transaction, or a savepoint within one, and yields its cursor.
Block = Callable[[], AbstractContextManager[Cursor]]


def declare_all(
    block: Block, settings: Settings, *, only: Container[str] | None = None
) -> set[str]:
    """Store the schedules that this process declares, each in a transaction of its own.

    With `only`, stores those with these names. Logs those that cannot run. Returns the names of
    those whose rows other sessions have locked. Raises OperationalError if the database is lost,
    InternalError if it is read only.
    """
    declared = _declared().values()
    return _declare_each(
        block, [each for each in declared if only is None or each.name in only], settings
    )


def retire(block: Block) -> None:
    """Disable the schedules of code that no process has declared for a day."""
    with block() as cursor:
        retired = declared_schedules.retire(cursor, retire_after=RETIRE_AFTER)
    for name in retired:
        logger.warning(
            "schedule %s is disabled: no process has declared it for %d hours",
            name,
            RETIRE_AFTER // 3600,
            extra={"event": "schedule_retired", "schedule": name},
        )


def keep_declared(block: Block, settings: Settings) -> set[str]:
    """Declare the schedules of this process again.

    This does not overwrite a newer declaration by another process: of two versions of the code, the
    one that started last decides. Returns and raises the same as `declare_all()`.
    """
    declared = _declared()
    with block() as cursor:
        known = declared_schedules.touch(
            cursor, own_types(), touch_after=REDECLARE_INTERVAL, retire_after=RETIRE_AFTER
        )
    return _declare_each(block, [declared[name] for name in declared.keys() - known], settings)


def own_types() -> dict[str, str]:
    """Return the type of each schedule that this process declares, by name."""
    return {name: each.type for name, each in _declared().items()}


def _declared() -> dict[str, Declaration]:
    found: dict[str, Declaration] = {}
    for each in all_schedules():
        found.setdefault(each.name, each)
    return found


def _declare_each(block: Block, declared: Iterable[Declaration], settings: Settings) -> set[str]:
    locked = set[str]()
    for each in declared:
        try:
            with block() as cursor:
                declare(cursor, each, settings)
        except OperationalError as error:
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            locked.add(each.name)
        except (MQError, DatabaseError) as error:
            if is_lost(error):  # a read-only server, which says nothing about the schedule
                raise
            logger.error(
                "schedule %s cannot run: %s",
                each.name,
                one_line(str(error)),
                extra={"event": "schedule_invalid", "schedule": each.name},
            )
    return locked


def declare(cursor: Cursor, declared: Declaration, settings: Settings) -> None:
    """Store one declared schedule; raises MQError if it cannot run.

    The code decides everything except `enabled`, if an operator has decided that. The next time is
    computed again only if the cron expression, the interval or the time zone has changed.
    """
    type = check_type(declared.type)
    now = schedules.now(cursor)
    times = times_of(declared.cron, declared.every, declared.tz, start=now)
    declared_schedules.declare(
        cursor,
        touch_after=REDECLARE_INTERVAL,
        name=declared.name,
        type=type,
        payload=settings.encode_payload(declared.payload),
        metadata=settings.encode_metadata(declared.metadata),
        cron=declared.cron,
        every=None if declared.every is None else declared.every.total_seconds(),
        tz=declared.tz,
        queue=declared.queue,
        catch_up=declared.catch_up,
        overlap=declared.overlap,
        expires=None if declared.expires is None else declared.expires.total_seconds(),
        enabled=declared.enabled,
        next_at=next(times.after(now), None),
    )
