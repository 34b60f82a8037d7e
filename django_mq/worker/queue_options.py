"""The options with which a worker claims from each queue, and the arguments of a claim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypedDict

from django_mq import handlers
from django_mq.conf import Settings
from django_mq.handlers import Handler
from django_mq.policy.routing import Pattern
from django_mq.worker.ordered_queues import LEASE_SECONDS as OWNER_LEASE

#: The maximum number of queues that a worker remembers: messages may keep naming new ones.
REMEMBERED_QUEUES = 10_000


class ClaimArguments(TypedDict):
    """The arguments that every claim statement has."""

    claimer: str
    lease: float
    limit: int
    max_bytes: int
    admitted: bool
    excluded: Sequence[int]
    nonatomic: Sequence[str]


class ClaimOptions(NamedTuple):
    """The options with which messages of a queue are claimed.

    `kind` is the kind of executor that the messages need, since room is counted per kind.
    `max_in_flight` is the maximum number of messages in flight over the fleet, unless an operator
    has set another maximum. `list_size` is the maximum number of messages per call of a handler
    outside a transaction. `ahead`: coroutines may be claimed before they have slots; those of lists
    would start in shorter lists.
    """

    kind: str
    lease: float
    batch_size: int
    batch_bytes: int
    ordered: bool = False
    skip_dead: bool = False
    max_in_flight: int | None = None
    list_size: int = 1
    ahead: bool = True


class ClaimOptionsCache:
    """Claim options per queue, from settings and handlers; `batch_size` overrides the settings."""

    def __init__(self, settings: Settings, *, batch_size: int | None) -> None:
        self._settings = settings
        self._batch_size = batch_size
        self._queues = cache(partial(handlers.allowed_queues, settings=settings))
        self.of = lru_cache(REMEMBERED_QUEUES)(self._make)
        #: Returns the handlers that may run messages of a queue.
        self.handlers_of = lru_cache(REMEMBERED_QUEUES)(self._find_handlers)

    def lease_of(self, queue: str) -> float:
        """Return the lease of the messages of `queue`, in seconds.

        In an ordered queue, this is at most the lease of the queue's owner: the messages move with
        the queue.
        """
        options = self._settings.queue(queue)
        return min(options.lease, OWNER_LEASE) if options.ordered else options.lease

    def batch_size_of(self, queue: str) -> int:
        """Return how many messages of `queue` a batch may have."""
        return self._batch_size or self._settings.queue(queue).batch_size

    def shortest_lease(self) -> float:
        """Return the shortest lease of all queues."""
        return min([self._settings.lease, *map(self.lease_of, self._settings.queues)])

    def ordered(self, patterns: Iterable[str]) -> list[str]:
        """Return the ordered queues that match one of `patterns`."""
        wanted = [Pattern(text) for text in patterns]
        return [
            name
            for name, options in self._settings.queues.items()
            if options.ordered and any(pattern.matches(name) for pattern in wanted)
        ]

    def _find_handlers(self, queue: str) -> list[Handler]:
        return [each for each in handlers.all_handlers() if queue in self._queues(each)]

    def _make(self, queue: str) -> ClaimOptions:
        options = self._settings.queue(queue)
        found = self.handlers_of(queue)
        batch_size = self.batch_size_of(queue)
        longest = min(batch_size, self._batch_size or self._settings.batch_size)
        lists = (
            min(longest, each.max_batch or longest)
            for each in found
            if each.batch and not (each.atomic or each.is_async)
        )
        return ClaimOptions(
            kind=_kind(found),
            lease=self.lease_of(queue),
            batch_size=batch_size,
            batch_bytes=options.batch_bytes,
            ordered=options.ordered,
            skip_dead=options.on_dead_head == "skip",
            max_in_flight=options.max_in_flight,
            list_size=max(lists, default=1),
            ahead=not any(each.batch and each.is_async for each in found),
        )


def _kind(found: Iterable[Handler]) -> str:
    """Return what the handlers of a queue need: `sync` (threads), `async` (slots) or `both`."""
    kinds = {each.is_async for each in found}
    if kinds == {True}:
        return "async"
    return "both" if True in kinds else "sync"


def nonatomic_names() -> list[str]:
    """Return the names and aliases of the handlers that `leases.start()` always starts.

    A coroutine may begin without that statement.
    """
    return [
        name
        for each in handlers.all_handlers()
        if not (each.atomic or each.is_async)
        for name in (each.name, *each.aliases)
    ]
