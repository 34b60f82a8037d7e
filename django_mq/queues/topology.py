"""Which types reach which handlers, according to this process's handlers and recent messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter

from django_mq import handlers
from django_mq.conf import alias_of, get_settings
from django_mq.models import Schedule
from django_mq.policy.handler_stats import HandlerTimings
from django_mq.policy.routing import TASKS, Pattern
from django_mq.queues.fleet import timings, workers
from django_mq.queues.transactions import reading
from django_mq.store import types as store

#: The newest stored messages, and handled ones, whose types are counted.
NEWEST = 10_000


@dataclass(frozen=True, slots=True)
class MessageType:
    """A type, the handlers that subscribe to it, and its number among the newest messages."""

    type: str
    handlers: tuple[str, ...]
    messages: int


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A handler, and how many attempts the live workers have counted since they started."""

    name: str
    patterns: tuple[str, ...]
    queues: tuple[str, ...]
    where: bool
    attempts: int
    last_at: datetime | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The types and the handlers that are known here, by name.

    `observed` says whether a worker is alive that could have called a handler.
    """

    types: tuple[MessageType, ...]
    handlers: tuple[Subscriber, ...]
    observed: bool

    @property
    def unheard(self) -> tuple[MessageType, ...]:
        """The types to which no handler subscribes."""
        return tuple(each for each in self.types if not each.handlers)

    @property
    def uncalled(self) -> tuple[Subscriber, ...]:
        """The handlers that no live worker has called; empty if none is alive."""
        return tuple(each for each in self.handlers if self.observed and not each.attempts)


def topology(*, only: Collection[str] | None = None, using: str | None = None) -> Topology:
    """Return which types reach which of the handlers of this process.

    Types are the plain patterns of handlers, those that schedules broadcast, and those of the
    newest 10,000 stored messages and the newest 10,000 in the history. `only` limits handlers and
    messages to these queues. Whether `where` of a handler lets a message pass is not considered.
    Tasks subscribe to nothing and are left out.
    """
    alias, settings = alias_of(using), get_settings()
    found = [
        each
        for each in handlers.all_handlers()
        if each.patterns and (only is None or handlers.queue_of(each, settings) in only)
    ]
    with reading(alias) as cursor:
        counted = store.newest(cursor, limit=NEWEST, queues=only)
    names = {type for type in counted if not type.startswith(TASKS)}
    names.update(text for each in found for text in each.patterns if Pattern(text).is_plain)
    if only is None:
        schedules = Schedule.objects.using(alias).filter(enabled=True)
        names.update(schedules.values_list("type", flat=True))
    ended, table = timings(using=alias), handlers.table()
    types = tuple(
        MessageType(
            type,
            tuple(each.name for each in found if table.takes(each, type)),
            counted.get(type, 0),
        )
        for type in sorted(names)
    )
    by_name = sorted(found, key=attrgetter("name"))
    subscribers = tuple(_subscriber(each, ended.get(each.name)) for each in by_name)
    return Topology(types, subscribers, any(each.alive for each in workers(using=alias)))


def _subscriber(handler: handlers.Handler, ended: HandlerTimings | None) -> Subscriber:
    return Subscriber(
        handler.name,
        handler.patterns,
        tuple(handlers.allowed_queues(handler, get_settings())),
        bool(handler.where),
        ended.acked + ended.failed + ended.snoozed if ended else 0,
        ended.last_at if ended else None,
    )
