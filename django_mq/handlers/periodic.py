"""`periodic()` declares a schedule: a message that workers broadcast at given times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from django_mq.exceptions import InvalidName, InvalidOption, MQError
from django_mq.handlers import registry
from django_mq.handlers.callables import is_django_task, shown
from django_mq.handlers.cron import times_of
from django_mq.handlers.registry import Declaration
from django_mq.messages.classes import class_of, message_class
from django_mq.policy.column_bounds import MAX_SPAN_SECONDS
from django_mq.policy.due_times import CATCH_UP, OVERLAP, CatchUp, Overlap
from django_mq.policy.metadata import check_metadata
from django_mq.policy.names import check_name
from django_mq.policy.routing import TASKS
from django_mq.values import Seconds, as_seconds, short_repr

if TYPE_CHECKING:
    from django_mq.conf import Settings

#: The example in the errors of refused schedules.
CLOCK = '@handler("shop.reports.due", cron="0 6 * * *")'


def periodic(
    name: str,
    type: str,
    payload: Any = None,
    *,
    cron: str | None = None,
    every: Seconds | None = None,
    tz: str = "UTC",
    queue: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    catch_up: CatchUp = "once",
    overlap: Overlap = "allow",
    expires: Seconds | None = None,
    enabled: bool = True,
) -> None:
    """Declare a schedule on which workers broadcast `type`. Call it in `handlers.py`.

        periodic("daily-report", "shop.reports.daily", cron="0 6 * * mon-fri", tz="Europe/Berlin")

    Give `cron`, read in the time zone `tz` (needs the extra `periodic`), or `every`: seconds or a
    timedelta of at least 1 s; the first time is one `every` after a worker first stored the
    schedule. Each time is broadcast at most once over the whole fleet, in the transaction that
    moves the schedule to its next time, at most POLL_INTERVAL + 1 s late while a worker lives whose
    code declares the schedule.

    - `payload`, `metadata`, `queue`, `expires`: as in `broadcast()`; `expires` is a duration.
    - `catch_up`: of the times that were missed because no worker ran, broadcast the latest
      (`"once"`), the newest 1,000 (`"all"`), or none (`"none"`). A time up to a minute late is not
      missed, except after a longer standstill if the next time is no more than a minute away.
    - `overlap="skip"`: a handler gets no message while the schedule's last one for it still waits
      or runs.
    - `enabled`: applies until an operator enables or disables the schedule; their decision wins.

    Raises InvalidName and InvalidOption. `manage.py check` reports bad expressions, unknown time
    zones and names that are declared twice (django_mq.E010).
    """
    if not isinstance(enabled, bool):
        raise InvalidOption(f"enabled must be True or False, not {short_repr(enabled)}")
    declared = replace(
        declaration(name, type, cron=cron, every=every, tz=tz),
        payload={} if payload is None else payload,
        metadata=check_metadata(metadata),
        queue="" if queue is None else check_name(queue, "queue"),
        catch_up=_one_of(catch_up, "catch_up", CATCH_UP),
        overlap=_one_of(overlap, "overlap", OVERLAP),
        expires=None if expires is None else _duration(expires, "expires", minimum=0),
        enabled=enabled,
        call_site=_position(sys._getframe(1)),
    )
    registry.add_schedule(declared)


def _position(frame: FrameType) -> tuple[object, ...]:
    """Return what a frame is about to run: the file, the line, and the call within the line."""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti


def declaration(
    name: str, type: str, *, cron: str | None, every: Seconds | None, tz: str
) -> Declaration:
    """Return a schedule without further options; raises the errors of `periodic()`."""
    if cron is not None and every is not None:
        raise InvalidOption("a schedule takes cron= or every=, not both")
    if cron is None and every is None:
        raise InvalidOption("a schedule needs cron= or every=")
    if cron is not None and not (isinstance(cron, str) and cron.strip()):
        raise InvalidOption(
            f'cron must be an expression such as "0 6 * * *", not {short_repr(cron)}'
        )
    if not isinstance(tz, str):
        raise InvalidOption(f'tz must be a name such as "Europe/Berlin", not {short_repr(tz)}')
    return Declaration(
        name=check_name(name, "schedule name"),
        type=_type_name(type),
        cron=" ".join(cron.split()) if cron else "",
        every=None if every is None else _duration(every, "every", minimum=1),
        tz=tz,
    )


def check_type(type: str) -> str:
    """Return the type of a schedule; raise InvalidName if it cannot be broadcast."""
    name = check_name(type, "type")
    if name.startswith(TASKS):
        raise InvalidName(
            f"its type {name} is that of a Django task, and tasks are not broadcast: declare a"
            f" {CLOCK} whose function calls the task's enqueue()"
        )
    return name


def check_expires(expires: timedelta | None, settings: Settings) -> None:
    """Raise InvalidOption if `broadcast()` would refuse this lifetime of a message."""
    if expires is None:
        return
    if expires <= timedelta(0):
        raise InvalidOption("expires must be above zero: no attempt could ever start")
    if expires.total_seconds() > settings.max_delay:
        raise InvalidOption(
            f"expires ({expires}) is more than {settings.max_delay:,.0f} s ahead (MAX_DELAY)"
        )


def problems(settings: Settings) -> Iterable[tuple[str, str]]:
    """Yield the name of each declared schedule that cannot run, and what is wrong with it."""
    seen: dict[str, Declaration] = {}
    for each in registry.all_schedules():
        if seen.setdefault(each.name, each) != each:
            yield each.name, "it is declared twice: give each schedule a name of its own"
            continue
        try:
            check_type(each.type)
            times_of(each.cron, each.every, each.tz, start=datetime(2000, 1, 1, tzinfo=UTC))
            check_expires(each.expires, settings)
            settings.encode_payload(each.payload)
            metadata = json.loads(settings.encode_metadata(each.metadata))
        except MQError as error:
            yield each.name, str(error)
            continue
        except ImproperlyConfigured:
            continue  # ENCODER is wrong, which is reported on its own (E008)
        if each.queue and (refused := disallowed(each.type, metadata, each.queue, settings)):
            yield each.name, refused


def disallowed(type: str, metadata: Mapping[str, Any], queue: str, settings: Settings) -> str:
    """Say why the message of a schedule cannot go to `queue`; empty if it can, as far as known.

    `broadcast()` refuses the message if one of its handlers does not allow the queue.
    """
    found = registry.table().match(type, metadata)
    texts = (registry.disallowed(each, type, queue, settings) for each in found)
    return next(filter(None, texts), "")


def _type_name(type: Any) -> str:
    """Return the type; raise InvalidName for a task, a class or an instance."""
    if is_django_task(type):
        raise InvalidName(
            f"a schedule broadcasts a message, and {shown(type.func)} is a Django task: declare a"
            f" {CLOCK} whose function calls {shown(type.func)}.enqueue()"
        )
    found = class_of(type) or message_class(type)
    if found is not None:
        raise InvalidName(
            f"a schedule takes a type and a payload, not {found.cls.__qualname__}: declare a"
            f" {CLOCK} whose function broadcasts the instance"
        )
    return check_name(type, "type")


def _duration(value: Seconds, what: str, *, minimum: int) -> timedelta:
    seconds = as_seconds(value)
    in_range = seconds is not None and minimum <= seconds <= MAX_SPAN_SECONDS
    if seconds is None or not in_range or not timedelta(seconds=seconds):
        more = f"of at least {minimum} s" if minimum else "above zero"
        raise InvalidOption(
            f"{what} must be seconds or a timedelta {more}, not {short_repr(value)}"
        )
    return timedelta(seconds=seconds)


def _one_of(value: Any, what: str, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise InvalidOption(f"{what} must be one of {', '.join(allowed)}, not {short_repr(value)}")
    return value
