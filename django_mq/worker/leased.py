"""A delivery outside a transaction: its handler may extend its lease and finish it itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_mq.exceptions import LeaseLost
from django_mq.messages import Delivery
from django_mq.store import leases, settle

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow

P = ParamSpec("P")
T = TypeVar("T")


class Clock(Protocol):
    """Whoever would end the handler at its timeout, and can be told to wait longer."""

    def extend(self, seconds: float) -> None: ...


class LeasedDelivery(Delivery):
    """What a handler that is not atomic gets."""

    __slots__ = ("_alias", "_clock", "_lease", "finished")

    def __init__(self, row: ClaimedRow, *, alias: str, lease: float, clock: Clock) -> None:
        super().__init__(row)
        self._alias = alias
        self._lease = lease
        self._clock = clock
        self.finished = False

    def extend(self, seconds: float) -> None:
        """Have `seconds` more from now before the handler's time is over.

        The lease itself is renewed by the worker. Raises LeaseLost when it is gone.
        """
        with connections[self._alias].cursor() as cursor:
            if not leases.start(cursor, [self.fence], lease=max(seconds, self._lease)):
                raise self._lost()
        self._clock.extend(seconds)

    @contextmanager
    def finish(self, result: Any = None) -> Iterator[None]:
        """Commit the writes of this `with` block and the ack together, or neither.

        Raises LeaseLost, before the block runs, when the lease is gone: a worker that was
        frozen meanwhile writes nothing. `result` goes to whoever asked for one.
        """
        if self.finished:
            raise self._lost()
        with transaction.atomic(using=self._alias, durable=True):
            with connections[self._alias].cursor() as cursor:
                if not settle.ack(cursor, [self.fence]):
                    raise self._lost()
            yield
        self.finished = True

    async def afinish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread, inside `finish()`; return what it returns."""
        return await sync_to_async(self._call_and_finish)(function, *args, **kwargs)

    def _call_and_finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.finish():
            return function(*args, **kwargs)

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"message {self.id} in queue {self.queue}, attempt {self.attempt}: the lease is gone;"
            " another worker may have it, or it is done"
        )
