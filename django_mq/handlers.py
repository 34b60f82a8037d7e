"""`@handler` marks a function as a subscriber; one process-wide registry keeps the marked ones.

A row names a handler of this registry, never code to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from django_mq.backoff import RetryPolicy, as_seconds
from django_mq.callables import check_function, layers_of, name_of, shown, source_of
from django_mq.exceptions import InvalidHandler, InvalidName
from django_mq.routing import RoutingTable, check_name, check_pattern

if TYPE_CHECKING:
    from django_mq.conf import Settings

F = TypeVar("F", bound=Callable[..., Any])
Match = Literal["all", "any"]


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """One subscription; `retry`, `timeout` (seconds) and `queue` are None for the settings'."""

    function: Callable[..., Any]
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


class Registry:
    """Handlers by name and alias, in the order of their registration."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._by_name: dict[str, Handler] = {}
        self._table: RoutingTable[Handler] | None = None

    def add(self, new: Handler) -> None:
        """Register `new`; raises InvalidHandler when its function or a name is taken."""
        layers = layers_of(new.function)
        for known in self._handlers.values():
            if any(known.function is layer for layer in layers):
                raise InvalidHandler(
                    f"{new.name} is a handler already: give all its patterns to one @handler(...),"
                    " or write a second function for a second subscription"
                )
        old = self._handlers.get(new.name)
        source = source_of(new.function)
        replaced = old if old and source and source == source_of(old.function) else None
        for name in (new.name, *new.aliases):
            holder = self._by_name.get(name)
            if holder is not None and holder is not replaced:
                raise InvalidHandler(
                    f"the name {name} of {shown(new.function)} belongs to the handler"
                    f" {shown(holder.function)} already: give one of them name=..., and list the"
                    " old name in aliases=(...) if rows may still carry it"
                )
        if replaced:
            self._by_name = {k: v for k, v in self._by_name.items() if v is not replaced}
        self._handlers[new.name] = new
        self._by_name.update(dict.fromkeys((new.name, *new.aliases), new))
        self._table = None

    def get(self, name: str) -> Handler | None:
        return self._by_name.get(name)

    def all(self) -> tuple[Handler, ...]:
        return tuple(self._handlers.values())

    def table(self) -> RoutingTable[Handler]:
        table = self._table
        if table is None:
            table = self._table = RoutingTable(self.all())
        return table


_registry = Registry()


def get(name: str) -> Handler | None:
    """Return the handler that has this name or alias, or None."""
    return _registry.get(name)


def all_handlers() -> tuple[Handler, ...]:
    """Return all handlers, in the order of their registration."""
    return _registry.all()


def table() -> RoutingTable[Handler]:
    """Return the routing table of all handlers; made anew when a handler was added."""
    return _registry.table()


@contextmanager
def isolated(handlers: Iterable[Handler] = ()) -> Iterator[Registry]:
    """For tests: inside the block only `handlers` and those registered in it exist.

    `isolated(all_handlers())` starts from what is there. The registry is restored at the end.
    Not for several threads at once: there is one registry in a process.
    """
    global _registry
    before, _registry = _registry, Registry()
    try:
        for each in handlers:
            _registry.add(each)
        yield _registry
    finally:
        _registry = before


def queue_of(handler: Handler, settings: Settings) -> str:
    """Return the queue whose rows this handler runs when the producer names none."""
    return settings.default_queue if handler.queue is None else handler.queue


def allowed_queues(handler: Handler, settings: Settings) -> tuple[str, ...]:
    """Return the queues that may hold this handler's rows: its own first, then `queues=`."""
    return tuple(dict.fromkeys((queue_of(handler, settings), *handler.queues)))


def retry_of(handler: Handler | None, queue: str, settings: Settings) -> RetryPolicy:
    """Return the policy of a message that carries none: handler's, else the queue's or default."""
    if handler is not None and handler.retry is not None:
        return handler.retry
    return settings.queue(queue).retry


def timeout_of(handler: Handler, settings: Settings) -> float:
    """Return the seconds after which an attempt of this handler is ended."""
    return settings.timeout if handler.timeout is None else handler.timeout


def handler(
    *patterns: str,
    queue: str | None = None,
    queues: Iterable[str] = (),
    where: Mapping[str, Any] | None = None,
    match: Match = "all",
    name: str | None = None,
    aliases: Iterable[str] = (),
    schema_version: int = 1,
    retry: RetryPolicy | None = None,
    atomic: bool = True,
    batch: bool = False,
    timeout: float | timedelta | None = None,
) -> Callable[[F], F]:
    """Subscribe a function to the messages whose type matches one of `patterns`.

    Each subscriber gets a copy of the message in its own `queue` (default: DEFAULT_QUEUE), and
    that copy fails, retries and dies on its own. The function is called with one `Delivery` and
    stays what it is: you can call it yourself.

    An atomic handler's writes to the message's database and the removal of the message commit
    together, once. What that transaction cannot undo - a mail, a payment, a call to another
    service - belongs into a handler with `atomic=False`, which may run more than once for one
    message. `async def` handlers are never atomic, whatever `atomic` says.

    - `queues`: further queues into which `broadcast(queue=...)` may move its messages.
    - `where`: values the metadata must have, `match="all"` of them or `"any"`.
    - `name`: stored in rows, default `module.qualname`; `aliases`: names it had before.
    - `schema_version`: the newest that it understands; newer messages are held.
    - `retry`, `timeout` (seconds or timedelta): default the queue's and the settings'.
    - `batch`: it gets a list of deliveries, which succeed or fail together.

    Raises InvalidHandler when what it is put on, or an option, cannot become a handler.
    """
    if not patterns:
        raise InvalidHandler('say what the handler subscribes to: @handler("shop.orders.placed")')
    if len(patterns) == 1 and callable(patterns[0]):
        raise InvalidHandler(
            f"say what {shown(patterns[0])} subscribes to, in brackets after @handler:"
            ' @handler("shop.orders.placed")'
        )
    try:
        checked_patterns = tuple(dict.fromkeys(check_pattern(each) for each in patterns))
        if queue is not None:
            queue = check_name(queue, "queue")
        checked_queues = _names(queues, "queues")
        checked_aliases = _names(aliases, "aliases")
        if name is not None:
            name = check_name(name, "handler name")
    except InvalidName as error:
        raise InvalidHandler(str(error)) from error
    if where is not None and not (
        isinstance(where, Mapping) and all(isinstance(key, str) for key in where)
    ):
        raise InvalidHandler('where= is a dict of metadata, as in where={"tier": "gold"}')
    if match not in ("all", "any"):
        raise InvalidHandler(f'match= is "all" or "any" of where, not {match!r}')
    if type(schema_version) is not int or schema_version < 1:
        raise InvalidHandler(f"schema_version= counts from 1, not {schema_version!r}")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise InvalidHandler(f"retry= is a RetryPolicy(...), not {retry!r}")
    seconds = None if timeout is None else as_seconds(timeout)
    if timeout is not None and not seconds:
        raise InvalidHandler(f"timeout= is seconds above zero or a timedelta, not {timeout!r}")

    def register(function: F) -> F:
        is_async = check_function(function)
        if batch and (is_async or not atomic):
            raise InvalidHandler(
                f"{shown(function)}: a batch=True handler runs in one transaction, so it is a"
                " plain def with atomic=True; without batch=True it gets one delivery at a time"
            )
        own_name = name_of(function) if name is None else name
        _registry.add(
            Handler(
                function=function,
                name=own_name,
                patterns=checked_patterns,
                queue=queue,
                queues=checked_queues,
                where=dict(where) if where else None,
                match=match,
                aliases=tuple(each for each in checked_aliases if each != own_name),
                schema_version=schema_version,
                retry=retry,
                atomic=bool(atomic) and not is_async,
                batch=bool(batch),
                timeout=seconds,
                is_async=is_async,
            )
        )
        return function

    return register


def _names(values: Iterable[str], what: str) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidHandler(f'{what}= is a tuple of names, as in {what}=("mail",)')
    return tuple(dict.fromkeys(check_name(each, what) for each in values))
