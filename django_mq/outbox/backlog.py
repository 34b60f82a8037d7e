"""max_backlog: a full queue refuses messages. Counts are cached, so the limit is approximate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.exceptions import BroadcastBusy
from django_mq.store.backlog import count_waiting
from django_mq.store.rows import NewRow

#: Seconds for which a count is cached: that of a queue with room, and that of a full queue.
FRESH, FULL = 1.0, 0.05


@dataclass(slots=True)
class _Count:
    """The rows that waited at `at`, plus those this process has added; `test`: see `_test_of()`."""

    at: float
    waiting: int
    test: object


# By alias and queue. No lock: a superfluous count does no harm.
_counts: dict[tuple[str, str], _Count] = {}


def admit(
    connection: BaseDatabaseWrapper, limits: Mapping[str, int], rows: Iterable[NewRow]
) -> None:
    """Raise BroadcastBusy if these rows would make a queue longer than its limit.

    A process counts the waiting rows of a queue at most once per second, or per 50 ms while the
    queue is full; between counts it adds its own rows.
    """
    for queue, more in Counter(row.queue for row in rows if row.queue in limits).items():
        _admit(connection, queue, limits[queue], more)


def _admit(connection: BaseDatabaseWrapper, queue: str, limit: int, more: int) -> None:
    known = _counts.get((connection.alias, queue))
    test = _test_of(connection)
    if known is not None and known.test is not test:
        known = None
    age = float("inf") if known is None else monotonic() - known.at
    if known is None or age >= FRESH or (known.waiting + more > limit and age >= FULL):
        at = monotonic()
        with connection.cursor() as cursor:
            known = _Count(at, count_waiting(cursor, queue=queue, limit=limit), test)
        _counts[connection.alias, queue] = known
    if known.waiting + more > limit:
        raise BroadcastBusy(
            f"queue {queue} has {known.waiting:,} messages waiting and no room for {more:,} more:"
            f" max_backlog is {limit:,}. Try again later, send fewer at once, or run more workers"
        )
    known.waiting += more


def _test_of(connection: BaseDatabaseWrapper) -> object:
    """Return the block of the current TestCase, or None; the next test has other rows."""
    blocks: list[Any] = connection.atomic_blocks
    return next((block for block in reversed(blocks) if block._from_testcase), None)
