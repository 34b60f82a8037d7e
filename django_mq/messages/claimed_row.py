"""The row of one message as a claim returns it, and the fence that names the claim."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from operator import itemgetter
from typing import NamedTuple

from django_mq.policy.routing import TASKS


class ClaimedRow(NamedTuple):
    """The columns that a claim returns, in the order of the statement.

    `payload` and `metadata` are JSON text, decoded when a handler reads them. `waited`: seconds
    from the due time to the claim. `expires_in`: seconds from the claim until no attempt may start.
    `created` and `claimed`: seconds since 1970, by the database's clock; the driver reads a number
    ten times as fast as a datetime.
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
    expires_in: float | None = None

    @property
    def is_django_task(self) -> bool:
        """Whether this is a Django task: its result is kept, and no requester waits for it."""
        return self.type.startswith(TASKS)

    @property
    def created_at(self) -> datetime:
        """When the message was broadcast."""
        return datetime.fromtimestamp(self.created, UTC)

    @property
    def claimed_at(self) -> datetime:
        """When the message was claimed."""
        return datetime.fromtimestamp(self.claimed, UTC)


class Fence(NamedTuple):
    """Names one claim; every settle of a delivery names its fence."""

    id: int
    attempt: int
    claimed_by: str


#: A Fence as a plain tuple.
PlainFence = tuple[int, int, str]


def worker_of(claimer: str | None) -> str:
    """Return the id of the worker process of a claim; empty for None."""
    return (claimer or "").partition(":")[0]


_fence_columns = (ClaimedRow._fields.index(name) for name in ("id", "attempts", "claimed_by"))
#: Returns the fence of a row as a plain tuple, at a tenth of the cost of a Fence.
fence_of: Callable[[ClaimedRow], PlainFence] = itemgetter(*_fence_columns)
