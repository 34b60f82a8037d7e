"""The process-wide registry of handlers and schedules, and the settings that complete handlers.

A row names a registered handler or the task of an imported module, never code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from django.apps import apps

from django_mq.exceptions import InvalidHandler
from django_mq.handlers.callables import (
    code_of,
    is_same_function,
    layers_of,
    shown,
    source_of,
)
from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.due_times import CatchUp, Overlap
from django_mq.policy.routing import TASKS, RoutingTable
from django_mq.policy.similar_names import similar

if TYPE_CHECKING:
    from django_mq.conf import Settings
    from django_mq.messages import ClaimedRow

Match = Literal["all", "any"]
#: The metadata key of a replay: the id of the message that it repeats. It may go to any handler.
REPLAY = "mq.replay_of"
#: How many patterns an error text names.
PATTERNS_IN_ERROR = 5
#: The fields that decide which messages a handler gets, and in which queue.
SUBSCRIPTION = ("patterns", "queue", "where", "match")


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """One subscription. The settings apply where `queue`, `retry` or `timeout` (seconds) is None.

    `call` is `function`, or a wrapper that converts its argument as annotated. A handler without
    patterns gets only messages whose rows name it. `any_queue`: its messages may be in any queue.
    The list of a batch handler has at most `max_batch` messages; while it is not full, it waits
    `linger` seconds for more. Handled messages are kept `history` seconds (0: not at all), with
    their content if `history_payload`; None: as the queue says. `of_row` returns the handler for a
    single row, if rows carry options of their own.
    """

    function: Callable[..., Any]
    call: Callable[..., Any]
    name: str
    patterns: tuple[str, ...]
    queue: str | None
    queues: tuple[str, ...]
    where: Mapping[str, Any] | None
    match: Match
    aliases: tuple[str, ...]
    schema_version: int
    retry: RetryPolicy | None
    atomic: bool
    batch: bool
    timeout: float | None
    is_async: bool
    max_batch: int | None = None
    linger: float = 0.0
    history: float | None = None
    history_payload: bool | None = None
    any_queue: bool = False
    of_row: Callable[[ClaimedRow], Handler] | None = None


class AnyQueue(tuple[str, ...]):
    """The queues of a handler that takes messages from any queue; iterating yields named ones."""

    __slots__ = ()

    def __contains__(self, queue: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Declaration:
    """A schedule as code declares it, checked; either `cron` or `every` is set.

    Two equal schedules with the same `call_site` come from a module that was imported twice.
    """

    name: str
    type: str
    cron: str
    every: timedelta | None
    tz: str
    payload: Any = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    queue: str = ""
    catch_up: CatchUp = "once"
    overlap: Overlap = "allow"
    expires: timedelta | None = None
    enabled: bool = True
    call_site: tuple[object, ...] | None = None


class Registry:
    """Handlers by name and alias, in the order of registration; and schedules."""

    def __init__(self) -> None:
        self.schedules: list[Declaration] = []
        #: Called by `get()` with a name that is not registered; may register its handler.
        self.finder: Callable[[str], Handler | None] | None = None
        self._handlers: dict[str, Handler] = {}
        self._by_name: dict[str, Handler] = {}
        self._table: RoutingTable[Handler] | None = None

    def add(self, new: Handler) -> None:
        """Register `new`; raise InvalidHandler if one of its names is taken.

        A handler from a reloaded module replaces the one from the same source line; while the apps
        are loading, another function from a loop, a factory or a decorator does not.
        """
        old = self._handlers.get(new.name)
        if old and any(old.function is layer for layer in layers_of(new.function)):
            raise InvalidHandler(
                f"{new.name} is already a handler: give all its patterns to one @handler(...), or"
                " give each @handler(...) a name=... of its own for a second subscription"
            )
        replaced = old if old and _is_reloaded(old, new) else None
        for name in (new.name, *new.aliases):
            holder = self._by_name.get(name)
            if holder is not None and holder is not replaced:
                raise _name_taken(name, new, holder)
        if replaced:
            self._by_name = {k: v for k, v in self._by_name.items() if v is not replaced}
        self._handlers[new.name] = new
        self._by_name.update(dict.fromkeys((new.name, *new.aliases), new))
        self._table = None

    def get(self, name: str) -> Handler | None:
        """Return the handler that has this name or alias, or None; `finder` may register it."""
        found = self._by_name.get(name)
        return self.finder(name) if found is None and self.finder is not None else found

    def registered(self, name: str) -> Handler | None:
        """Return the handler that has this name or alias, if it has been registered."""
        return self._by_name.get(name)

    def all(self) -> tuple[Handler, ...]:
        """Return all handlers, in the order of registration."""
        return tuple(self._handlers.values())

    def table(self) -> RoutingTable[Handler]:
        """Return the routing table of all handlers; the same object until a handler is added."""
        table = self._table
        if table is None:
            table = self._table = RoutingTable(self.all())
        return table


def _is_reloaded(old: Handler, new: Handler) -> bool:
    """Return whether `new` is `old` from a module that was loaded again.

    A loop, a factory or a decorator also makes several functions at one source line, but from one
    code object; loading a module compiles another one. The code of all tasks is that of their
    runner. Once the apps are ready, tests make handlers by calling one helper again and again.
    """
    source = source_of(new.function)
    if source is None or source != source_of(old.function):
        return False
    if apps.ready or not new.patterns or code_of(new.function) is not code_of(old.function):
        return True
    return is_same_function(new.function, old.function) and all(
        getattr(new, name) == getattr(old, name) for name in SUBSCRIPTION
    )


def _name_taken(name: str, new: Handler, holder: Handler) -> InvalidHandler:
    """Return the error for two handlers of one name."""
    text = (
        f"the name {name} of {shown(new.function)} already belongs to the handler"
        f" {shown(holder.function)}: give one of them name=..., and list its old name in"
        " aliases=(...) if stored messages may still carry it"
    )
    code = code_of(new.function)
    if code is not None and code is code_of(holder.function):
        text += "; if a decorator made both, it needs functools.wraps"
    return InvalidHandler(text)


_registry = Registry()
get = _registry.get
registered = _registry.registered
all_handlers = _registry.all
table = _registry.table
add = _registry.add


def is_subscribed(handler: Handler, type: str) -> bool:
    """Return whether `handler` may run a message of this type that names it.

    One of its patterns must match; its `where` was applied at the broadcast. A task has no pattern:
    its messages have its own type.
    """
    if not handler.patterns:
        return type == TASKS + handler.name
    return table().takes(handler, type)


def unsubscribed(handler: Handler, type: str) -> str:
    """Say why `handler` does not run a message of this type that names it."""
    if not handler.patterns:
        return f"its type {type} is not that of task {handler.name}"
    patterns = ", ".join(handler.patterns[:PATTERNS_IN_ERROR]) + (
        ", ..." if handler.patterns[PATTERNS_IN_ERROR:] else ""
    )
    return f"its type {type} matches no pattern of handler {handler.name} ({patterns})"


def find_with(finder: Callable[[str], Handler | None]) -> None:
    """Look up names that no handler has with `finder`, which registers the handler if it can."""
    _registry.finder = finder


def add_schedule(new: Declaration) -> None:
    """Add a declared schedule; the system checks report a second one with the same name."""
    _registry.schedules.append(new)


def all_schedules() -> tuple[Declaration, ...]:
    """Return all declared schedules, in the order of declaration."""
    return tuple(_registry.schedules)


@contextmanager
def isolated(handlers: Iterable[Handler] = ()) -> Iterator[Registry]:
    """For tests: in the block there are only `handlers`, and those registered in the block.

    `isolated(all_handlers())` starts with the current handlers. The registry is restored at the
    end. Not thread-safe: a process has one registry.
    """
    before = vars(_registry).copy()
    handlers = tuple(handlers)
    vars(_registry).update(vars(Registry()))
    try:
        for each in handlers:
            add(each)
        yield _registry
    finally:
        vars(_registry).update(before)


def queue_of(handler: Handler, settings: Settings) -> str:
    """Return the queue of this handler's messages unless the producer names another."""
    return settings.default_queue if handler.queue is None else handler.queue


def allowed_queues(handler: Handler, settings: Settings) -> tuple[str, ...]:
    """Return the queues that may hold this handler's messages: its own first, then `queues=`."""
    names = dict.fromkeys((queue_of(handler, settings), *handler.queues))
    return AnyQueue(names) if handler.any_queue else tuple(names)


def disallowed(handler: Handler, type: str, queue: str, settings: Settings) -> str:
    """Say why messages of this type for `handler` cannot go to a queue; empty if they can."""
    allowed = allowed_queues(handler, settings)
    if queue in allowed:
        return ""
    near = similar(queue, allowed, most=1)
    advice = f" (did you mean {near[0]}?); else" if near else ";"
    return (
        f"{type} cannot go to queue {queue}: its handler {handler.name} allows only"
        f" {', '.join(allowed)}{advice} allow the queue with @handler(..., queues=({queue!r},))"
    )


def retry_of(handler: Handler | None, queue: str, settings: Settings) -> RetryPolicy:
    """Return the policy of a message that carries none: the handler's, else the queue's."""
    if handler is not None and handler.retry is not None:
        return handler.retry
    return settings.queue(queue).retry


def timeout_of(handler: Handler, settings: Settings) -> float:
    """Return the seconds after which an attempt of this handler times out."""
    return settings.timeout if handler.timeout is None else handler.timeout
