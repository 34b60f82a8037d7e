"""A claimed message on its way through a handler."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar

from django_mq.exceptions import UnreadablePayload
from django_mq.messages.claimed_row import ClaimedRow, Fence
from django_mq.values import When

P = ParamSpec("P")
T = TypeVar("T")
if TYPE_CHECKING:  # a TypeVar default needs Python 3.13; type checkers include typing_extensions
    from typing_extensions import TypeVar as TypeVarWithDefault

    Payload = TypeVarWithDefault("Payload", default=Any)
else:
    Payload = TypeVar("Payload")


#: A time before all others. Not 0: the clock starts with the machine, so on a machine that has just
#: started, 0 is recent.
LONG_AGO = float("-inf")


class Delivery(Generic[Payload]):
    """One message, claimed for one attempt; handlers get it as their argument. Read-only.

    A handler whose argument is annotated `Delivery[OrderPlaced]` gets an instance of that message
    class as `payload`.
    """

    __slots__ = (
        "__weakref__",
        "_asked_at",
        "_fence",
        "_leased_at",
        "_metadata",
        "_payload",
        "_row",
    )

    #: Whether the handler runs inside a transaction, and whether it may call `finish()`.
    _is_atomic: ClassVar[bool] = True
    _can_finish: ClassVar[bool] = False

    _row: ClaimedRow
    _asked_at: float
    _leased_at: float
    _fence: Fence
    _payload: Any
    _metadata: Any

    def __init__(self, row: ClaimedRow, asked_at: float = LONG_AGO) -> None:
        # `asked_at`: when the claim was sent, by the worker's lease clock; LONG_AGO if the message
        # was taken over, or if that is unknown. `_leased_at` moves with each renewal; it is
        # LONG_AGO for a message that must be locked before it starts.
        self._row = row
        self._asked_at = self._leased_at = asked_at

    @property
    def _is_taken_over(self) -> bool:
        """Whether another claim's handler may still run: it was taken over, or that is unknown."""
        return self._asked_at == LONG_AGO

    @property
    def id(self) -> int:
        """The id of the message; the same in all attempts."""
        return self._row[0]

    @property
    def queue(self) -> str:
        return self._row[1]

    @property
    def type(self) -> str:
        return self._row[2]

    @property
    def handler(self) -> str:
        """The name of the handler for which this copy was stored."""
        return self._row[3]

    @property
    def schema_version(self) -> int:
        return self._row[4]

    @property
    def payload(self) -> Payload:
        """The payload, decoded on first access.

        Raises UnreadablePayload if this interpreter cannot decode the stored JSON.
        """
        try:
            return self._payload  # type: ignore[no-any-return]
        except AttributeError:
            self._payload = _decode(self._row[5], self)
            return self._payload  # type: ignore[no-any-return]

    @property
    def raw(self) -> Any:
        """The payload as it was stored, in whatever version; a new object at each access."""
        return _decode(self._row[5], self)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, decoded on first access; raises as `payload` does."""
        try:
            return self._metadata  # type: ignore[no-any-return]
        except AttributeError:
            text = self._row[6]
            self._metadata = {} if text == "{}" else _decode(text, self)
            return self._metadata  # type: ignore[no-any-return]

    @property
    def priority(self) -> int:
        return self._row[7]

    @property
    def key(self) -> str | None:
        """The order key, if the message has one."""
        return self._row[8]

    @property
    def attempt(self) -> int:
        """The number of this attempt; the first is 1."""
        return self._row[9]

    @property
    def max_attempts(self) -> int:
        """The number of the last attempt; if it fails, the message is dead."""
        return self._row[10]

    @property
    def created_at(self) -> datetime:
        return self._row.created_at

    @property
    def age(self) -> timedelta:
        """The time from the broadcast to the claim, by the database's clock."""
        return self._row.claimed_at - self._row.created_at

    def extend(self, seconds: float) -> None:
        """Move the handler's timeout to `seconds` from now.

        The lease is extended to the same moment: if the whole host is lost, the message waits until
        then. Raises LeaseLost if the lease is lost, ValueError unless `seconds` is above zero, and
        TypeError in an atomic handler: only handlers with `atomic=False` and `async def` handlers
        can extend.

        If a coroutine calls it, only the timeout moves, without a query; the worker's renewals keep
        the lease. `await sync_to_async(delivery.extend)(seconds)` does both.
        """
        raise self._atomic("extend()")

    def finish(self, result: Any = None) -> AbstractContextManager[None]:
        """Commit the writes of this `with` block and the ack together, or neither.

        `result`, as it is at the end of the block, becomes the result of the message, if one was
        requested; the handler's return value is then ignored. Raises LeaseLost before the block
        runs if the lease is lost, so that a worker that was frozen in the meantime writes nothing.
        Raises TypeError in an atomic handler: only handlers with `atomic=False` and `async def`
        handlers can finish early.
        """
        raise self._atomic("finish()")

    async def afinish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread, inside `finish()`, and return its return value.

        That value is also the result of the message, if one was requested.
        """
        raise self._atomic("afinish()")

    def fail(self, error: Exception | str) -> None:
        """Fail this message alone, as if its handler had raised `error`; text: `Exception(error)`.

        The verdicts `fail()`, `retry()`, `snooze()` and `reject()` are for lists of deliveries
        (`batch=True`) outside transactions. They take effect when the handler ends, however it
        ends; the last verdict wins. They raise TypeError in any other handler, and LeaseLost once
        the call has ended.
        """
        raise self._unlisted("fail()")

    def retry(self, after: When | None = None) -> None:
        """Retry this message at `after`, else by the retry policy. Like `raise Retry(after)`."""
        raise self._unlisted("retry()")

    def snooze(self, after: When, backoff: bool = False, reason: str = "") -> None:
        """Run this message again at `after`; no attempt is used. Like `raise Snooze()`."""
        raise self._unlisted("snooze()")

    def reject(self, reason: str = "rejected") -> None:
        """Dead-letter this message at once. Like `raise Reject(reason)`."""
        raise self._unlisted("reject()")

    def _unlisted(self, what: str) -> TypeError:
        return TypeError(
            f"{what} is for handlers with batch=True and atomic=False: {self.handler} raises its"
            " error, or Retry, Snooze or Reject"
        )

    def _atomic(self, what: str) -> TypeError:
        return TypeError(
            f"{what} is for handlers with atomic=False: the writes of {self.handler} commit"
            " together with the ack when it returns"
        )

    @property
    def fence(self) -> Fence:
        """The id, attempt and claimer that a settle of this delivery names."""
        try:
            return self._fence
        except AttributeError:
            row = self._row
            self._fence = Fence(row[0], row[9], row[12])
            return self._fence

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id} {self.type} queue={self.queue}"
            f" attempt {self.attempt} of {self.max_attempts}>"
        )


def _decode(text: str, delivery: Delivery) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadablePayload(
            f"message {delivery.id} in queue {delivery.queue} cannot be decoded: {error}"
        ) from error
