"""max_backlog: a full queue takes no more. Counted now and then, so the limit is approximate."""

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

#: Seconds that a count is believed, and that the count of a full queue is.
FRESH, FULL = 1.0, 0.05


@dataclass(slots=True)
class _Count:
    """What waited at `at`, and what this process has added since; `test` as in `_test_of()`."""

    at: float
    waiting: int
    test: object


# By alias and queue. No lock: a count too many does no harm.
_counts: dict[tuple[str, str], _Count] = {}


def admit(
    connection: BaseDatabaseWrapper, limits: Mapping[str, int], rows: Iterable[NewRow]
) -> None:
    """Raise BroadcastBusy if these rows would make a queue longer than its limit.

    What waits is counted at most once a second in each process and queue, or each 50 ms while
    the queue is full; in between the rows of this process are added to it.
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
            f"queue {queue} may have {limit:,} messages waiting (max_backlog), and has"
            f" {known.waiting:,}: no room for {more:,} more. Try again later, send fewer at once,"
            " or run more workers"
        )
    known.waiting += more


def _test_of(connection: BaseDatabaseWrapper) -> object:
    """Return the block of the TestCase that runs, None outside: the next one finds other rows."""
    blocks: list[Any] = connection.atomic_blocks
    return next((block for block in reversed(blocks) if block._from_testcase), None)
