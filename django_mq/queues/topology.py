"""Which types reach which handlers, according to this process's handlers and recent messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter

from django_mq import handlers
from django_mq.conf import alias_of, get_settings
from django_mq.conf.local_time import aware, utc_now
from django_mq.models import Schedule
from django_mq.policy.handler_totals import HandlerTimings
from django_mq.policy.routing import TASKS, Pattern
from django_mq.queues.arguments import queue_names
from django_mq.queues.fleet import timings, workers
from django_mq.queues.known_queues import read_names
from django_mq.queues.transactions import reading
from django_mq.store import Cursor, read_figures
from django_mq.store import types as types_store
from django_mq.store.readers import prepare_to_read

#: The numbers of newest stored and newest handled messages whose types are counted.
NEWEST = 10_000
#: The number of messages per queue and priority, and in all, among which held ones, and those that
#: no handler takes, are looked for.
HELD_PER_LANE, MAX_HELD = 1_000, 50_000
#: The most kinds of waiting messages that are compared with the handlers.
MAX_KINDS = 100
#: How far back calls of handlers are counted.
PERIOD = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class MessageType:
    """A type, the handlers that subscribe to it, and how many of the newest messages have it.

    `held` says whether messages of the type are held, however old they are.
    """

    type: str
    handlers: tuple[str, ...]
    messages: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A handler, how many of its attempts ended in the last seven days, and when the last did.

    Workers that have ended count, too. The last moment is known to the minute if that worker is
    gone, and to the hour after an hour or two.
    """

    name: str
    patterns: tuple[str, ...]
    queues: tuple[str, ...]
    where: bool
    attempts: int
    last_at: datetime | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The types and the handlers known in this process, by name.

    `tasks` has the names of the tasks, which subscribe to nothing: only `enqueue()` reaches them.
    `observed` says whether any worker is alive, or has called a handler in the last seven days.
    """

    types: tuple[MessageType, ...]
    handlers: tuple[Subscriber, ...]
    observed: bool
    tasks: tuple[str, ...] = ()

    @property
    def unheard(self) -> tuple[MessageType, ...]:
        """The types to which no handler subscribes."""
        return tuple(each for each in self.types if not each.handlers)

    @property
    def uncalled(self) -> tuple[Subscriber, ...]:
        """The handlers without a counted call in the last seven days; empty unless `observed`.

        A worker process that is killed takes the counts of its last seconds with it.
        """
        return tuple(each for each in self.handlers if self.observed and not each.attempts)


def topology(*, only: str | Collection[str] | None = None, using: str | None = None) -> Topology:
    """Return which types reach which of the handlers of this process.

    Types are the plain patterns of handlers, the types that schedules broadcast, and the types of
    the newest 10,000 stored messages, of the newest 10,000 in the history, and of held messages:
    per queue and priority, 1,000 each of those due for longest, due last and due next are examined.
    `only` limits handlers, tasks and messages to one queue or several. The `where` of handlers is
    ignored.
    """
    queues, alias, settings = queue_names(only), alias_of(using), get_settings()
    visible = [
        each
        for each in handlers.all_handlers()
        if queues is None or handlers.queue_of(each, settings) in queues
    ]
    found = [each for each in visible if each.patterns]
    with reading(alias) as cursor:
        prepare_to_read(cursor)
        counted = types_store.newest(cursor, limit=NEWEST, queues=queues)
        asked = [name for name in read_names(cursor) if queues is None or name in queues]
        held = held_types(cursor, queues=asked)
        calls = read_figures.calls(cursor, since=PERIOD.total_seconds())
    names = {type for type in counted.keys() | held if not type.startswith(TASKS)}
    names.update(text for each in found for text in each.patterns if Pattern(text).is_plain)
    if queues is None:
        schedules = Schedule.objects.using(alias).filter(enabled=True)
        names.update(schedules.values_list("type", flat=True))
    live, table = timings(using=alias), handlers.table()
    types = tuple(
        MessageType(
            type,
            tuple(each.name for each in found if table.takes(each, type)),
            counted.get(type, 0),
            type in held,
        )
        for type in sorted(names)
    )
    subscribers = tuple(
        _subscriber(each, calls.get(each.name), live.get(each.name))
        for each in sorted(found, key=attrgetter("name"))
    )
    observed = bool(calls) or any(each.alive for each in workers(using=alias))
    tasks = tuple(sorted(each.name for each in visible if not each.patterns))
    return Topology(types, subscribers, observed, tasks)


def held_types(cursor: Cursor, *, queues: Sequence[str]) -> dict[str, types_store.HeldMessages]:
    """Return the types of held messages of `queues`; call it after `prepare_to_read()`."""
    return types_store.held(cursor, queues=queues, limit=HELD_PER_LANE, maximum=MAX_HELD)


def waiting_kinds(
    cursor: Cursor, *, queues: Sequence[str]
) -> tuple[list[types_store.WaitingKind], set[str]]:
    """Return the most frequent kinds of messages that wait in `queues` and are not held.

    Also return the queues of which not all messages were read. Call it after `prepare_to_read()`.
    """
    found = types_store.kinds(
        cursor, queues=queues, limit=HELD_PER_LANE, maximum=MAX_HELD, kinds=MAX_KINDS
    )
    read = Counter[str]()
    for each in found:
        read[each.queue] += each.messages
    return found, {queue for queue, messages in read.items() if messages >= HELD_PER_LANE}


def _subscriber(
    handler: handlers.Handler, stored: read_figures.HandlerCalls | None, live: HandlerTimings | None
) -> Subscriber:
    """Return what is known about a handler; snoozed attempts are known only for live workers."""
    attempts, last_at = (stored.attempts, stored.last_at) if stored else (0, None)
    if live is not None and live.last_at and live.last_at > utc_now() - PERIOD:
        attempts = max(attempts, live.acked + live.failed + live.snoozed)
        last_at = max(aware(last_at or live.last_at), live.last_at)
    return Subscriber(
        handler.name,
        handler.patterns,
        tuple(handlers.allowed_queues(handler, get_settings())),
        bool(handler.where),
        attempts,
        last_at,
    )
