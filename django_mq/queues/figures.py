"""Figures over time, by step and by handler, and the rates at which queues fill and empty."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django_mq.conf import alias_of
from django_mq.policy.figures import SPANS, Counted, Span, summed
from django_mq.queues.arguments import queue_names
from django_mq.queues.transactions import reading
from django_mq.store import Cursor, read_figures
from django_mq.store.readers import prepare_to_read
from django_mq.values import short_repr

#: The longest and the shortest span, in seconds, over which rates are computed.
WINDOW, SHORTEST_WINDOW = 300, 60


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of handlers in a span: per step, the latest last, and per queue and handler.

    Both names are empty for messages without a handler, or with a handler unknown to their worker.
    """

    span: str
    step: timedelta
    now: datetime
    steps: dict[datetime, Counted]
    handlers: dict[tuple[str, str], Counted]

    @property
    def total(self) -> Counted:
        """The sum over the span."""
        return summed(self.steps.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The messages per second that entered and left a queue, over about the last five minutes.

    Shortly after a start, over the time since the first minute with figures of any queue, but at
    least a minute. A message leaves when it is acked or dies. `at_least`: more than 5,000 messages
    are new, so `incoming` may be higher.
    """

    incoming: float = 0.0
    outgoing: float = 0.0
    at_least: bool = False

    def empty_in(self, depth: int) -> timedelta | None:
        """Return how long a queue of `depth` messages takes to empty; None if it does not shrink.

        Also None if it takes longer than a year.

        >>> Rate(incoming=2.0, outgoing=12.0).empty_in(600)
        datetime.timedelta(seconds=60)
        """
        shrinks = self.outgoing - self.incoming
        if not depth:
            return timedelta(0)
        if shrinks <= 0 or depth / shrinks > _MAX_FORECAST:
            return None
        return timedelta(seconds=depth / shrinks)


#: Seconds; rates do not predict anything beyond a year.
_MAX_FORECAST = 366 * 86400


def figures(
    span: str = "hour",
    *,
    queue: str | Collection[str] | None = None,
    using: str | None = None,
) -> Figures:
    """Return the figures of the last hour (by minute), day (by hour) or week (by three hours).

    `queue` is a name, or several; None means all. Workers write their figures every 10 seconds. The
    cost grows with the number of rows: for an hour, one per minute, worker, queue and handler.
    """
    if not isinstance(span, str) or span not in SPANS:
        raise ValueError(f"span must be hour, day or week, not {short_repr(span)}")
    names = queue_names(queue)
    with reading(alias_of(using)) as cursor:
        prepare_to_read(cursor)
        new = read_figures.uncounted(cursor, queues=names)
        return figures_of(cursor, SPANS[span], new, names)


def figures_of(
    cursor: Cursor, span: Span, new: read_figures.UncountedSnapshot, queues: Sequence[str] | None
) -> Figures:
    """Return the figures of `queues`, with messages that are `new` among the steps' broadcast."""
    step, starts = span.step, span.starts(new.now)
    steps = {at: Counted() for at in starts}
    handlers: dict[tuple[str, str], Counted] = {}
    for part in read_figures.parts(cursor, since=starts[0], queues=queues):
        found = Counted(*part[3:8], _histogram(part.waited), _histogram(part.ran))
        steps.setdefault(part.at - part.at % step, Counted()).add(found)
        handlers.setdefault((part.queue, part.handler), Counted()).add(found)
    for each in new.messages:
        if (at := each.minute - each.minute % step) in steps:
            steps[at].broadcast += each.messages
    return Figures(
        span.name,
        timedelta(seconds=step),
        datetime.fromtimestamp(new.now, UTC),
        {datetime.fromtimestamp(at, UTC): steps[at] for at in sorted(steps)},
        dict(sorted(handlers.items())),
    )


def _histogram(text: str) -> dict[int, int]:
    """Return the counts of a histogram; CHECK constraints guarantee its form."""
    return {int(bucket): int(count) for bucket, count in json.loads(text).items()}


def rates(
    *, queue: str | Collection[str] | None = None, using: str | None = None
) -> dict[str, Rate]:
    """Return the rate of each queue that took or lost a message in the last five minutes."""
    names = queue_names(queue)
    with reading(alias_of(using)) as cursor:
        prepare_to_read(cursor)
        return rates_of(cursor, read_figures.uncounted(cursor, queues=names), names)


def rates_of(
    cursor: Cursor, new: read_figures.UncountedSnapshot, queues: Sequence[str] | None
) -> dict[str, Rate]:
    """Return the rates of `queues`; `new` are the messages that no figures count yet."""
    since = new.now - new.now % 60 + 60 - WINDOW
    flows = {each.queue: each for each in read_figures.flows(cursor, since=since, queues=queues)}
    uncounted: dict[str, int] = {}
    first = read_figures.first_counted(cursor, since=since) or new.now
    for each in new.messages:
        if each.minute >= since:
            first = min(first, each.minute)
            uncounted[each.queue] = uncounted.get(each.queue, 0) + each.messages
    seconds = max(SHORTEST_WINDOW, new.now - first)
    at_least = new.complete_since is not None and new.complete_since > since
    found = {}
    for name in sorted(flows.keys() | uncounted.keys()):
        flow = flows.get(name, read_figures.Flow(name, 0, 0))
        if at_least:  # only the newest are known, and they may cover just a few seconds
            newest = max(1.0, new.now - (new.complete_since or 0.0))
            incoming = max(flow.incoming / seconds, uncounted.get(name, 0) / newest)
        else:
            incoming = (flow.incoming + uncounted.get(name, 0)) / seconds
        found[name] = Rate(incoming=incoming, outgoing=flow.outgoing / seconds, at_least=at_least)
    return found
