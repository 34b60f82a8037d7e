"""Message counts by queue and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import overload

from django_mq.conf import alias_of, get_settings
from django_mq.operations.heads import ordered_queues, skipping_queues
from django_mq.policy.names import check_name
from django_mq.policy.rounding import counted
from django_mq.queues.decisions import effective_limit
from django_mq.queues.known_queues import names
from django_mq.queues.transactions import reading
from django_mq.store import Cursor
from django_mq.store import counts as counts_store
from django_mq.store import estimates as sampled
from django_mq.store.readers import prepare_to_read

#: Counts stop here. 10,000 rows take about 5 ms, a million half a second.
MAX_COUNT = 10_000
#: The approximate number of rows that `read_many_counts` reads, and the limits that its counts may
#: have. A row on a page of its own takes 4 us.
READ_BUDGET, COUNT_LIMITS = 50_000, (100, 200, 500, 1_000, 2_000, 5_000)
#: The number of kinds of messages for which each count reads rows: due, later, leased, keyed.
_KINDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """The messages of one queue, each counted once, by its state.

    A pause belongs to the queue and changes no count. `oldest` is how long the longest-due message
    has been due, None if none is due. `capped` names the counts that stopped at 10,000 rows: the
    real number may be higher. `estimated` has estimates of these, from 200 random pages of the
    table; `leased` then counts all messages in flight except the known `running`.

    The queue is backing off while `backoff_level` is above zero: nothing is claimed until
    `backoff_until` (None once that has passed), then `probe_by` runs one message as a probe (None
    while no worker does). `max_in_flight` is the limit that applies, None for no limit; `limited`
    says that an operator set it. `owner` is the worker process that owns an ordered queue, until
    `owned_until` or later.

    `blocked_key` is the order key of the oldest blocked message (among those counted), and `head`
    the message it waits for. In an `ordered` queue `head` is the first message while it is dead,
    delayed or retrying, which blocks the whole queue. `dead_head` is the oldest head, of any key,
    that is dead: the messages behind it wait until an operator acts. In an ordered queue it is set
    even if no message waits yet. `heads()` returns all lines in which messages wait.
    """

    queue: str
    processable: int
    delayed: int
    retrying: int
    held: int
    leased: int
    running: int
    blocked: int
    expired: int
    dead: int
    blocked_key: str | None
    head: int | None
    dead_head: int | None
    oldest: timedelta | None
    paused: bool
    paused_until: datetime | None
    backoff_level: int
    backoff_until: datetime | None
    probe_by: str | None
    max_in_flight: int | None
    limited: bool
    ordered: bool
    owner: str | None
    owned_until: datetime | None
    capped: frozenset[str]
    estimated: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def in_flight(self) -> int:
        """Messages that workers hold: running, or leased and about to run."""
        return self.leased + self.running

    @property
    def depth(self) -> int:
        """All messages except dead letters."""
        waiting = self.processable + self.delayed + self.retrying + self.held + self.expired
        return waiting + self.blocked + self.in_flight

    def shown(self, count: str) -> str:
        """Return the count named `count` as text: `"12"` or, if it was capped, `"≈ 180,000"`.

        Without an estimate it is `"10,000+"`.
        """
        return counted(getattr(self, count), self.about(count), stopped=self.is_capped(count))

    def is_capped(self, count: str) -> bool:
        """Return whether the count named `count` stopped at its limit."""
        return bool(self.capped & _PARTS.get(count, {count}))

    def about(self, count: str) -> int:
        """Return the count named `count`; if it was capped, its estimate where that is higher."""
        total = 0
        for name in _PARTS.get(count, {count}):
            known = getattr(self, name)
            total += max(known, self.estimated.get(name, 0)) if name in self.capped else known
        return total


_IN_FLIGHT = frozenset(("leased", "running"))
_DUE = frozenset(("processable", "held", "expired"))
_NOT_DUE = frozenset(("delayed", "retrying", "held", "expired"))
_WAITING = _DUE | _NOT_DUE | {"blocked"}
_PARTS = {"in_flight": _IN_FLIGHT, "depth": _WAITING | _IN_FLIGHT}


@overload
def counts(queue: None = None, *, using: str | None = None) -> dict[str, QueueCounts]: ...


@overload
def counts(queue: str, *, using: str | None = None) -> QueueCounts: ...


def counts(
    queue: str | None = None, *, using: str | None = None
) -> QueueCounts | dict[str, QueueCounts]:
    """Return the counts of `queue`, or of every known queue by name.

    Cheap enough to call every few seconds, however many messages there are; the cost is linear in
    the number of queues.
    """
    if queue is not None:
        return counts_of([check_name(queue, "queue")], using=using)[queue]
    return counts_of(names(using=using), using=using)


def counts_of(asked: Sequence[str], *, using: str | None) -> dict[str, QueueCounts]:
    """Return the counts of the queues `asked`, by name."""
    with reading(alias_of(using)) as cursor:
        return with_estimates(cursor, read_counts(cursor, asked))


def read_counts(
    cursor: Cursor, asked: Sequence[str], *, maximum: int | None = None
) -> dict[str, QueueCounts]:
    """Return the counts of the queues `asked`, each up to `maximum`; call it in a transaction."""
    prepare_to_read(cursor)
    return _read(cursor, asked, MAX_COUNT if maximum is None else maximum)


def _read(cursor: Cursor, asked: Sequence[str], maximum: int) -> dict[str, QueueCounts]:
    found = counts_store.counts(
        cursor,
        queues=asked,
        ordered=ordered_queues(),
        skipping=skipping_queues(),
        limit=maximum + 1,
    )
    by_name = {row.queue: _counts(row, maximum) for row in found}
    return {name: by_name[name] for name in asked}


def read_many_counts(
    cursor: Cursor, asked: Sequence[str], *, share: float = 1.0
) -> tuple[dict[str, QueueCounts], int]:
    """Return the counts of the queues `asked`, and the limit of each count.

    The limit is lower if more queues are long, or if a page can spend only a `share` of the usual
    time on its counts. Call it in a transaction.
    """
    minimum = min(COUNT_LIMITS[0], MAX_COUNT)
    found = read_counts(cursor, asked, maximum=minimum)
    longer = [name for name, each in found.items() if each.capped]
    rows = int(READ_BUDGET * share) // (_KINDS * max(1, len(longer)))
    maximum = min(
        MAX_COUNT, max(each for each in (*COUNT_LIMITS, MAX_COUNT) if each <= max(rows, minimum))
    )
    if longer and maximum > minimum:
        found |= _read(cursor, longer, maximum)
    return with_estimates(cursor, found), maximum


def with_estimates(cursor: Cursor, found: dict[str, QueueCounts]) -> dict[str, QueueCounts]:
    """Return the counts, with estimates of the capped ones."""
    capped = [name for name, each in found.items() if each.capped]
    if not capped:
        return found
    by_state = sampled.estimates(cursor, queues=capped)
    estimated = {}
    for name in capped:
        about = {state: by_state[name].get(state, 0) for state in sorted(found[name].capped)}
        if "leased" in about:
            about["leased"] -= found[name].running
        estimated[name] = replace(found[name], estimated=about)
    return found | estimated


def _by_state(row: counts_store.Census, maximum: int) -> tuple[dict[str, int], frozenset[str]]:
    """Return the count of each state, and the names of the counts that were capped."""
    due, due_held, due_expired = row.due
    later, later_held, later_expired, retrying = row.later
    leased, running, lapsed, lapsed_held, lapsed_expired = row.leased
    found = {
        "processable": due - due_held - due_expired + lapsed - lapsed_held - lapsed_expired,
        "delayed": later - later_held - later_expired - retrying,
        "retrying": retrying,
        "held": due_held + later_held + lapsed_held,
        "leased": leased - running - lapsed,
        "running": running,
        "blocked": row.keyed[1],
        "expired": due_expired + later_expired + lapsed_expired,
        "dead": row.dead,
    }
    capped = frozenset().union(
        _DUE if due > maximum else (),
        _NOT_DUE if later > maximum else (),
        # Lapsed leases are counted first: if there are more than `maximum`, rows of any kind may
        # follow.
        _IN_FLIGHT | _DUE if leased > maximum else (),
        {"blocked"} if row.keyed[0] > maximum else (),
        {"dead"} if row.dead > maximum else (),
    )
    return {name: min(n, maximum) if name in capped else n for name, n in found.items()}, capped


def _counts(row: counts_store.Census, maximum: int) -> QueueCounts:
    by_state, capped = _by_state(row, maximum)
    return QueueCounts(
        queue=row.queue,
        **by_state,
        blocked_key=row.blocked_key,
        head=row.head,
        dead_head=row.dead_head,
        oldest=None if row.oldest_seconds is None else timedelta(seconds=row.oldest_seconds),
        paused=row.paused,
        paused_until=row.paused_until,
        backoff_level=row.backoff_level,
        backoff_until=row.backoff_until,
        probe_by=row.probe_by,
        max_in_flight=effective_limit(row.queue, row.max_in_flight),
        limited=row.max_in_flight is not None,
        ordered=get_settings().queue(row.queue).ordered,
        owner=row.owner,
        owned_until=row.owned_until,
        capped=capped,
        estimated={},
    )
