"""How many messages a queue has, state by state, and which queues there are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import overload

from django_mq import handlers
from django_mq.conf import get_settings
from django_mq.queues.connecting import alias_of, reading
from django_mq.queues.deciding import effective_limit
from django_mq.queues.standing import ordered_queues, skipping_queues
from django_mq.routing import check_name
from django_mq.states import GONE_AFTER
from django_mq.store import census

#: Counting stops here. 10,000 rows take about 5 ms, a million half a second.
MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """The messages of one queue, each counted once, by its state.

    A pause is of the queue: here it hides no state of a message. `oldest` is for how long the
    message that is due longest has been due, None when none is. `capped` names the counts that
    stopped at 10,000 rows: there may be more.

    The queue backs off while `backoff_level` is above zero: nothing is claimed until
    `backoff_until` (None when that is past), then one message probes, claimed by `probe_by` (None
    when none does). `max_in_flight` is the limit that holds, None for none; it is `limited` when
    an operator decided that. `owner` is the worker process that has an ordered queue, until
    `owned_until` at least.

    `blocked_key` is the order key of the oldest blocked message (of those that were counted), and
    `head` the message that must go before it; in an `ordered` queue `head` is its first message
    while that one is dead, delayed or retrying, so that nothing of the queue goes on. `dead_head`
    is the oldest such message, of any key, that is dead: what is behind it does not go on by
    itself. `heads()` returns all such lines.
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

    @property
    def in_flight(self) -> int:
        """Messages that workers hold: running, or leased and about to run."""
        return self.leased + self.running

    @property
    def depth(self) -> int:
        """All messages but the dead."""
        waiting = self.processable + self.delayed + self.retrying + self.held + self.expired
        return waiting + self.blocked + self.in_flight

    def shown(self, count: str) -> str:
        """Return one of the counts as text: `"12"`, or `"10,000+"` when it was capped."""
        parts = {"in_flight": _IN_FLIGHT, "depth": _WAITING | _IN_FLIGHT}.get(count, {count})
        return f"{getattr(self, count):,}{'+' if self.capped & parts else ''}"


_IN_FLIGHT = frozenset(("leased", "running"))
_DUE = frozenset(("processable", "held", "expired"))
_LATER = frozenset(("delayed", "retrying", "held", "expired"))
_WAITING = _DUE | _LATER | {"blocked"}


@overload
def counts(queue: None = None, *, using: str | None = None) -> dict[str, QueueCounts]: ...


@overload
def counts(queue: str, *, using: str | None = None) -> QueueCounts: ...


def counts(
    queue: str | None = None, *, using: str | None = None
) -> QueueCounts | dict[str, QueueCounts]:
    """Return the counts of `queue`, or of every known queue by name.

    Cheap enough to be asked every few seconds, however many messages there are.
    """
    alias = alias_of(using)
    asked = [check_name(queue, "queue")] if queue is not None else names(using=alias)
    with reading(alias) as cursor:
        found = census.counts(
            cursor,
            queues=asked,
            ordered=ordered_queues(),
            skipping=skipping_queues(),
            limit=MOST + 1,
            gone_after=GONE_AFTER.total_seconds(),
        )
    by_name = {row.queue: _counts(row) for row in found}
    return by_name[queue] if queue is not None else {name: by_name[name] for name in asked}


def _counts(row: census.Census) -> QueueCounts:
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
        _DUE if due > MOST else (),
        _LATER if later > MOST else (),
        # The lapsed come first in the walk: behind 10,000 of them may be any.
        _IN_FLIGHT | _DUE if leased > MOST else (),
        {"blocked"} if row.keyed[0] > MOST else (),
        {"dead"} if row.dead > MOST else (),
    )
    return QueueCounts(
        queue=row.queue,
        **{each: min(n, MOST) if each in capped else n for each, n in found.items()},
        blocked_key=row.blocked_key,
        head=row.head,
        dead_head=row.dead_head,
        oldest=row.oldest,
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
    )


def names(*, using: str | None = None) -> list[str]:
    """Return the queues known here, sorted.

    Those that have rows, that were paused or limited once, that the settings list, and that
    handlers of this process take.
    """
    settings = get_settings()
    with reading(alias_of(using)) as cursor:
        found = census.names(cursor)
    found |= {settings.default_queue, *settings.queues}
    for each in handlers.all_handlers():
        found.update(handlers.allowed_queues(each, settings))
    return sorted(found)
