"""max_backlog: a full queue refuses messages. Counts are cached, so the limit is approximate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from django.db.backends.base.base import BaseDatabaseWrapper

from django_mq.exceptions import BroadcastBusy
from django_mq.outbox.blocks import commits_by_hand, testcase_block
from django_mq.policy.rounding import message_count
from django_mq.store.backlog import count_unblocked
from django_mq.store.rows import NewRow

#: A count may admit messages for ADMIT_SECONDS, and for FACTOR times its own duration if that is
#: longer, but at most MAX_ADMIT_SECONDS. While a session holds a snapshot, a count walks over all
#: messages of the queue that were handled since then: a million take 0.1 s.
ADMIT_SECONDS, MAX_ADMIT_SECONDS = 1.0, 10.0
#: A count may refuse messages for FACTOR times its own duration, but at most MAX_REFUSE_SECONDS, so
#: that counting a full queue takes at most a tenth of a process's time.
FACTOR, MAX_REFUSE_SECONDS = 10, 0.05


@dataclass(slots=True)
class _BacklogCount:
    """The rows that waited, and the rows that this process has `added` since.

    It admits nothing after `admits_until`, and refuses nothing after `refuses_until`. `writer` is
    the transaction that added the last rows: its own count includes them, and a rollback takes them
    back. `test`: the block of its TestCase, since the next test has other rows.
    """

    admits_until: float
    refuses_until: float
    waiting: int
    test: object
    added: int = 0
    writer: object = None

    def is_fresh(self, now: float) -> bool:
        return now < self.admits_until

    def may_refuse(self, now: float) -> bool:
        return not self.added and now < self.refuses_until


# By alias and queue. No lock: a superfluous count does no harm.
_counts: dict[tuple[str, str], _BacklogCount] = {}


def admit(
    connection: BaseDatabaseWrapper, limits: Mapping[str, int], rows: Iterable[NewRow]
) -> None:
    """Raise BroadcastBusy if these rows would make a queue longer than its limit.

    A process counts the waiting rows of a queue at most once per second, and adds its own rows in
    between. Before it refuses, it counts again, unless another transaction counted a moment ago.
    """
    for queue, more in Counter(row.queue for row in rows if row.queue in limits).items():
        _admit(connection, queue, limits[queue], more)


def _admit(connection: BaseDatabaseWrapper, queue: str, limit: int, more: int) -> None:
    known = last = _counts.get((connection.alias, queue))
    now = monotonic()
    if known is not None and (
        known.test is not testcase_block(connection) or not known.is_fresh(now)
    ):
        known = None
    if known is None or (known.waiting + known.added + more > limit and not known.may_refuse(now)):
        known = _counts[connection.alias, queue] = _count(connection, queue, limit, last)
    if known.waiting + known.added + more > limit:
        count = known.waiting + known.added
        waiting = message_count(count)
        if known.waiting >= limit:  # the count stops there
            waiting = f"{count:,} or more messages"
        raise BroadcastBusy(
            f"queue {queue} has {waiting} waiting and no room for {more:,} more: max_backlog is"
            f" {limit:,}. Try again later, or send fewer at once; manage.py mq_status {queue} shows"
            " whether it is paused or needs more workers"
        )
    known.added += more
    known.writer = _transaction_of(connection)


def _count(
    connection: BaseDatabaseWrapper, queue: str, limit: int, last: _BacklogCount | None
) -> _BacklogCount:
    began = monotonic()
    with connection.cursor() as cursor:
        waiting = count_unblocked(cursor, queue=queue, limit=limit)
    ended = monotonic()
    lasts = FACTOR * (ended - began)
    admits_until = max(began + ADMIT_SECONDS, ended + min(lasts, MAX_ADMIT_SECONDS))
    test, writer = testcase_block(connection), _transaction_of(connection)
    added_here = writer is not None and last is not None and last.writer is writer
    # With autocommit off, nothing distinguishes one transaction from the next.
    if test is not None or added_here or commits_by_hand(connection):
        return _BacklogCount(admits_until, began, waiting, test, writer=writer)
    return _BacklogCount(admits_until, ended + min(MAX_REFUSE_SECONDS, lasts), waiting, test)


def clear() -> None:
    """Clear all counts, since this process has just run messages."""
    _counts.clear()


def _transaction_of(connection: BaseDatabaseWrapper) -> object:
    """Return the list of on_commit hooks, which differs per transaction; None outside any."""
    return connection.run_on_commit if connection.in_atomic_block else None
