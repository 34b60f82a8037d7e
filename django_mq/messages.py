"""What goes in and what comes out: Message, Receipt, Delivery. Nothing here changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

from django_mq.exceptions import UnreadablePayload, When

if TYPE_CHECKING:
    from django_mq.backoff import RetryPolicy

P = ParamSpec("P")
T = TypeVar("T")
OnDuplicate = Literal["skip", "raise", "update", "debounce", "requeue"]
CopyOutcome = Literal["added", "updated", "debounced", "requeued", "duplicate"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message to broadcast; the fields are the options of `broadcast()`.

    `payload` is any JSON value (`None` is stored as `{}`); `after`, `expires` and `unique_for`
    are seconds, a timedelta or (the first two) an aware datetime; `priority` is -100..100,
    higher first.
    """

    type: str
    payload: Any = None
    _: KW_ONLY
    queue: str | None = None
    metadata: Mapping[str, Any] | None = None
    schema_version: int = 1
    after: When | None = None
    expires: When | None = None
    priority: int = 0
    key: str | None = None
    unique_id: str | None = None
    on_duplicate: OnDuplicate = "skip"
    unique_for: float | timedelta | None = None
    retry: RetryPolicy | None = None


@dataclass(frozen=True, slots=True)
class CopyReceipt:
    """What became of one copy: `handler` is empty for a copy that is routed at delivery.

    `reason` says why a duplicate is one: waiting, in_flight or quiet; else it is empty. `id` of a
    duplicate is the message that has the unique id; None while it is quiet, and for what was put
    aside, which has no row yet.
    """

    handler: str
    queue: str
    id: int | None
    outcome: CopyOutcome = "added"
    reason: str = ""


class Receipt:
    """What `broadcast()` stored: a copy for each handler. True when anything was stored or changed.

    Copies are made when looked at: of many receipts, few are.
    """

    __slots__ = ("_copies", "_ids", "_routes")

    _copies: tuple[CopyReceipt, ...]
    _routes: tuple[tuple[str, str], ...]
    _ids: tuple[int, ...]

    def __init__(self, copies: tuple[CopyReceipt, ...]) -> None:
        self._copies = copies

    @classmethod
    def of_added(cls, routes: tuple[tuple[str, str], ...], ids: tuple[int, ...]) -> Receipt:
        """Return the receipt of rows that were all added: (handler, queue) of each, and ids."""
        receipt = cls.__new__(cls)
        receipt._routes, receipt._ids = routes, ids
        return receipt

    @property
    def copies(self) -> tuple[CopyReceipt, ...]:
        """What became of each copy."""
        try:
            return self._copies
        except AttributeError:
            self._copies = tuple(
                CopyReceipt(handler, queue, id)
                for (handler, queue), id in zip(self._routes, self._ids, strict=True)
            )
            return self._copies

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the rows that were stored or changed, in the order of the copies."""
        return tuple(
            copy.id for copy in self.copies if copy.id is not None and copy.outcome != "duplicate"
        )

    @property
    def outcome(self) -> str:
        """The outcome that all copies share, else `"mixed"`."""
        outcomes = {copy.outcome for copy in self.copies}
        return outcomes.pop() if len(outcomes) == 1 else "mixed"

    def __bool__(self) -> bool:
        return any(copy.outcome != "duplicate" for copy in self.copies)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.copies == other.copies

    def __hash__(self) -> int:
        return hash(self.copies)

    def __repr__(self) -> str:
        return f"Receipt(copies={self.copies!r})"


@dataclass(frozen=True, slots=True)
class BulkReceipt:
    """What `broadcast_many()` of an iterator stored or changed: `count` rows, without their ids."""

    count: int

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """`ids` are removed; `in_flight` counts the matching copies that a worker holds, `put_aside`
    what was put aside for a unique id and is removed, too. True when anything was removed.
    """

    ids: tuple[int, ...]
    in_flight: int
    put_aside: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids) or self.put_aside > 0


class ClaimedRow(NamedTuple):
    """The columns that a claim returns, in the order of the statement.

    `payload` and `metadata` are JSON text: they are decoded when a handler looks. `waited` is
    the seconds from when it was due to its claim. `created` and `claimed` are seconds since 1970,
    by the database's clock: a tenth of what the driver takes to make a datetime.
    """

    id: int
    queue: str
    type: str
    handler: str
    schema_version: int
    payload: str
    metadata: str
    priority: int
    key: str | None
    attempts: int
    max_attempts: int
    retry: str | None
    claimed_by: str
    wants_result: bool
    suspect: bool
    held_for: float | None
    created: float
    claimed: float
    unique_id: str | None = None
    ordered: bool = False
    waited: float = 0.0
    expires: bool = False

    @property
    def created_at(self) -> datetime:
        """When the message was broadcast."""
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def claimed_at(self) -> datetime:
        """When it was claimed."""
        return datetime.fromtimestamp(self.claimed, UTC)


class Fence(NamedTuple):
    """What every settle names: nobody else has the same three."""

    id: int
    attempt: int
    claimed_by: str


#: A Fence as a plain tuple.
PlainFence = tuple[int, int, str]
_fence_places = (ClaimedRow._fields.index(name) for name in ("id", "attempts", "claimed_by"))
#: The fence of a row, for the hot path: it costs a tenth of a Fence.
fence_of: Callable[[ClaimedRow], PlainFence] = itemgetter(*_fence_places)


class Delivery:
    """One claimed message on its way through a handler.

    The fields are read from the row when looked at, and cannot be set: a delivery that
    nobody looks at costs three slots.
    """

    __slots__ = ("__weakref__", "_asked_at", "_fence", "_metadata", "_payload", "_row")

    _row: ClaimedRow
    _asked_at: float
    _fence: Fence
    _payload: Any
    _metadata: Any

    def __init__(self, row: ClaimedRow, asked_at: float = 0.0) -> None:
        # `asked_at`: when its claim was asked for, by `monotonic()`; 0 where that is not known.
        self._row = row
        self._asked_at = asked_at

    @property
    def id(self) -> int:
        """The id of the message's row; the same through all attempts."""
        return self._row[0]

    @property
    def queue(self) -> str:
        return self._row[1]

    @property
    def type(self) -> str:
        return self._row[2]

    @property
    def handler(self) -> str:
        """The name of the handler whose copy this is."""
        return self._row[3]

    @property
    def schema_version(self) -> int:
        return self._row[4]

    @property
    def payload(self) -> Any:
        """The payload, decoded at the first look.

        Raises UnreadablePayload when this interpreter cannot decode what is stored.
        """
        try:
            return self._payload
        except AttributeError:
            self._payload = _decode(self._row[5], self)
            return self._payload

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata, decoded at the first look; raises as `payload`."""
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
        """The attempt after which a failure is final."""
        return self._row[10]

    @property
    def created_at(self) -> datetime:
        return self._row.created_at

    @property
    def age(self) -> timedelta:
        """How old the message was when it was claimed, by the database's clock."""
        return self._row.claimed_at - self._row.created_at

    def extend(self, seconds: float) -> None:
        """Have `seconds` more from now before the handler's time is over.

        The lease reaches as far, though the worker renews it anyway: should the whole host be
        lost, the message waits for that long. Raises LeaseLost when the lease is gone,
        ValueError for what is not more than zero. Only for handlers with `atomic=False` and
        `async def`: in an atomic one it raises TypeError.
        """
        raise self._atomic("extend()")

    def finish(self, result: Any = None) -> AbstractContextManager[None]:
        """Commit the writes of this `with` block and the ack together, or neither.

        Raises LeaseLost, before the block runs, when the lease is gone: a worker that was
        frozen meanwhile writes nothing. `result` goes to whoever asked for one, as it is at the
        end of the block; what the handler returns then goes to nobody. Only for handlers with
        `atomic=False` and `async def`: in an atomic one it raises TypeError.
        """
        raise self._atomic("finish()")

    async def afinish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread, inside `finish()`; return what it returns.

        That is also what goes to whoever asked.
        """
        raise self._atomic("afinish()")

    def _atomic(self, what: str) -> TypeError:
        return TypeError(
            f"{what} is for handlers with atomic=False: what {self.handler} writes commits with"
            " the end of its message anyway, when it returns"
        )

    @property
    def fence(self) -> Fence:
        """Id, attempt and claimer: what a settle of this delivery names."""
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


#: What runs here now; what it broadcasts carries where it came from.
current_delivery: ContextVar[Delivery | None] = ContextVar("django_mq.delivery", default=None)


def _decode(text: str, delivery: Delivery) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadablePayload(
            f"message {delivery.id} in queue {delivery.queue} cannot be decoded: {error}"
        ) from error
