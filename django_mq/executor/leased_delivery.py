"""A delivery outside a transaction: its handler may extend its lease and finish it itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from types import CoroutineType
from typing import Any, ClassVar, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.utils.asyncio import async_unsafe

from django_mq.exceptions import HandlerBrokeTransaction, LeaseLost
from django_mq.executor import forks, history_rules, replies, settle_effects
from django_mq.executor.call_timeout import Timeout
from django_mq.executor.ended import ACKED, Ended
from django_mq.messages import Delivery, Fence, is_on_loop
from django_mq.policy.backoff import MAX_WAIT
from django_mq.store import Cursor, history, leases, notify, open_transaction, settle
from django_mq.store.server_errors import is_lost
from django_mq.values import as_seconds, short_repr

P = ParamSpec("P")
T = TypeVar("T")


class LeasedDelivery(Delivery):
    """The delivery that a handler with `atomic=False` gets."""

    __slots__ = ("_alias", "_began", "_claimed", "_lease", "_timeout", "finished")

    _is_atomic: ClassVar[bool] = False
    _can_finish: ClassVar[bool] = True

    def __init__(self, claimed: Delivery, *, alias: str, lease: float, timeout: Timeout) -> None:
        super().__init__(claimed._row)
        self._claimed = claimed
        self._alias = alias
        self._lease = lease
        self._timeout = timeout
        self._began = perf_counter()
        self.finished = False

    def extend(self, seconds: float) -> None:
        wanted = as_seconds(seconds)
        if wanted is None or not 0 < wanted <= MAX_WAIT:
            raise ValueError(
                f"extend({short_repr(seconds)}): give seconds or a timedelta, more than zero and"
                " at most 366 days"
            )
        if not is_on_loop():  # a query on the loop would hold up all coroutines
            self._extend_lease(max(wanted, self._lease))
        self._timeout.extend(wanted)

    def _extend_lease(self, lease: float) -> None:
        with connections[self._alias].cursor() as cursor:
            if self.id not in leases.start(cursor, self._call_fences(), lease=lease):
                raise self._lost()

    def _call_fences(self) -> list[Fence]:
        """Return the fences of all messages of the call."""
        return [self.fence]

    @async_unsafe(
        "finish() blocks, and a coroutine calls it: put the writes into a plain function, and"
        " `await delivery.afinish(function, *args)`"
    )
    def finish(self, result: Any = None) -> AbstractContextManager[None]:
        return self._finishing(lambda: result)

    @contextmanager
    def _finishing(self, result: Callable[[], Any]) -> Iterator[None]:
        if self.finished:
            raise self._lost()
        with transaction.atomic(using=self._alias, durable=True):
            with connections[self._alias].cursor() as cursor:
                if not self._ack(cursor):
                    raise self._lost()
                xid = open_transaction.current_transaction(cursor)
            # Before the handler's hooks: if one of them raises, the ack is committed all the same.
            transaction.on_commit(self._note_finished, using=self._alias)
            with forks.ForkBarrier():  # the transaction belongs to the parent
                yield
            self._must_be_in(xid)
            with connections[self._alias].cursor() as cursor:
                settle_effects.write(cursor, [self._acked(result)])
                if self._row.key is not None or self._row.ordered:
                    notify.ring_at_commit(cursor)  # the handler may run on for long after this
        self._note_finished()  # in a test's transaction no hook runs

    def _acked(self, result: Callable[[], Any]) -> Ended:
        value: Any = None
        if self._row.wants_result:
            value = replies.EncodedResults({self.id: replies.text(result())})
        return Ended(self, ACKED, value, perf_counter() - self._began)

    def _note_finished(self) -> None:
        self.finished = True

    def _must_be_in(self, xid: str) -> None:
        """Raise if the ack was rolled back: Django rolls back silently after a swallowed error."""
        try:
            with connections[self._alias].cursor() as cursor:
                here = open_transaction.current_transaction(cursor)
        except DatabaseError as error:
            if is_lost(error):  # the handler did nothing wrong
                raise
            raise HandlerBrokeTransaction(
                "a database error was swallowed inside finish(), or its connection closed: let it"
                " raise, or wrap the statement in transaction.atomic()"
            ) from error
        if here != xid:
            raise HandlerBrokeTransaction("the block of finish() ended its own transaction")

    def _ack(self, cursor: Cursor) -> bool:
        kept = history_rules.handled_one(self._row, perf_counter() - self._began)
        if kept is not None:
            return bool(history.ack(cursor, [kept]))
        return bool(settle.ack(cursor, [self.fence]))

    async def afinish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await sync_to_async(self._call_and_finish)(function, *args, **kwargs)

    def _call_and_finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        returned: list[T] = []
        with self._finishing(lambda: returned[0]):
            value: Any = function(*args, **kwargs)
            if type(value) is CoroutineType:
                value.close()
                raise TypeError(
                    "afinish() was given an async function, which would not run: Django has no"
                    " async transactions, so give it a plain function"
                )
            returned.append(value)
        return returned[0]

    def _lost(self) -> LeaseLost:
        where = f"message {self.id} in queue {self.queue}, attempt {self.attempt}"
        if self.finished:
            return LeaseLost(f"finish() was already called for {where}: it is done")
        return LeaseLost(
            f"{where}: the lease is lost; another worker may have the message, or it is done"
        )


def leased_at(delivery: Delivery) -> float:
    """Return when the claim or the last renewal of `delivery` was sent, by the lease clock.

    Renewals know only the delivery that was claimed.
    """
    claimed = delivery._claimed if isinstance(delivery, LeasedDelivery) else delivery
    return claimed._leased_at
