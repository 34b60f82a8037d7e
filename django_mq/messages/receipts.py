"""Results for producers: the rows that were stored, changed or removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.policy.uniqueness import CopyOutcome


@dataclass(frozen=True, slots=True)
class CopyReceipt:
    """The outcome of one copy; `handler` is empty for a copy that is routed at delivery.

    `outcome` is `added`, `updated`, `debounced`, `requeued` or `duplicate`. `reason` says why a
    copy is a duplicate (`waiting`, `in_flight` or `quiet`), and is empty otherwise. The `id` of a
    duplicate is the id of the message that holds the unique id, or None in its quiet time. The `id`
    of a copy that was put aside is None: it has no row yet.
    """

    handler: str
    queue: str
    id: int | None
    outcome: CopyOutcome = "added"
    reason: str = ""


class Receipt:
    """The result of `broadcast()`: one copy per handler. True if anything was stored or changed.

    `copies` is built on first access, since most receipts are never read.
    """

    __slots__ = ("_copies", "_ids", "_routes")

    _copies: tuple[CopyReceipt, ...]
    _routes: tuple[tuple[str, str], ...]
    _ids: tuple[int, ...]

    def __init__(self, copies: tuple[CopyReceipt, ...]) -> None:
        self._copies = copies

    @classmethod
    def of_added(cls, routes: tuple[tuple[str, str], ...], ids: tuple[int, ...]) -> Receipt:
        """Return the receipt of rows that were all added, by their (handler, queue) and ids."""
        receipt = cls.__new__(cls)
        receipt._routes, receipt._ids = routes, ids
        return receipt

    @property
    def copies(self) -> tuple[CopyReceipt, ...]:
        """The outcome of every copy."""
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
    """The result of `broadcast_many()` for an iterator: `count` rows were stored or changed."""

    count: int

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result of `cancel()`. True if anything was removed.

    `ids`: the removed messages. `in_flight`: how many matching copies workers hold; they stay.
    `put_aside`: how many of the removed messages had been put aside for a unique id.
    """

    ids: tuple[int, ...]
    in_flight: int
    put_aside: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids) or self.put_aside > 0
