"""The parts of the overview, as values for its template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean
from typing import Any

from django_mq import queues
from django_mq.admin.overview.charts import step_time
from django_mq.admin.queue_rows import COLUMNS, QueueRow
from django_mq.admin.state_counts import summed
from django_mq.admin.texts import excerpt
from django_mq.policy.durations import precise_span, span
from django_mq.policy.histogram import Latency
from django_mq.policy.rounding import round_estimate


@dataclass(frozen=True, slots=True)
class OverviewRow:
    """A queue in the list: its row, and how fast it fills and empties."""

    row: QueueRow
    rate: queues.Rate

    @property
    def is_idle(self) -> bool:
        """Whether it is empty, without recent flow, and not paused, backing off or limited to 0."""
        counts, rate = self.row.counts, self.rate
        stopped = counts.paused or counts.backoff_level or counts.max_in_flight == 0
        return not (counts.depth or counts.dead or rate.incoming or rate.outgoing or stopped)

    @property
    def _depth(self) -> tuple[int, str]:
        """The depth, and the sign before its text: nothing, about, or at least."""
        counts = self.row.counts
        if not counts.is_capped("depth"):
            return counts.depth, ""
        estimated = round_estimate(counts.about("depth"))
        return (estimated, "≈ ") if estimated > counts.depth else (counts.depth, "> ")

    @property
    def depth(self) -> str:
        """The depth as text; an estimate is marked as one."""
        count, sign = self._depth
        return f"{sign}{count:,}"

    @property
    def dead(self) -> Any:
        return next(cell for cell in self.row.cells if cell.name == "dead")

    @property
    def incoming(self) -> str:
        return f"{per(self.rate.incoming)}{'+' if self.rate.at_least else ''}"

    @property
    def outgoing(self) -> str:
        return per(self.rate.outgoing)

    @property
    def empty_in(self) -> str:
        """When it will be empty at these rates, as precisely as the depth is known."""
        counts, (count, sign) = self.row.counts, self._depth
        if not count:
            return ""
        if counts.paused or (left := self.rate.empty_in(count)) is None:
            return "grows" if self.rate.incoming > self.rate.outgoing else "never"
        return f"{sign}{span(max(left, timedelta(seconds=1)))}"


def overview_rows(rows: Iterable[QueueRow], rates: Mapping[str, queues.Rate]) -> list[OverviewRow]:
    """Return the queues by the age of their oldest due message, then by depth."""
    none = queues.Rate()
    found = [OverviewRow(row, rates.get(row.counts.queue, none)) for row in rows]
    return sorted(
        found,
        key=lambda each: (
            each.row.counts.oldest is None,
            -(each.row.counts.oldest or timedelta(0)),
            -each.row.counts.depth,
            each.row.counts.queue,
        ),
    )


def state_tiles(
    found: Collection[queues.QueueCounts], urls: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the sum of each state; an estimate if a queue's count was capped."""
    tiles = []
    for name, label in COLUMNS:
        count = sum(getattr(each, name) for each in found)
        text = summed((each, name) for each in found)
        url = urls.get(name, "") if count else ""
        tiles.append({"name": name, "label": label, "count": count, "text": text, "url": url})
    return tiles


def handler_rows(figures: queues.Figures, maximum: int) -> tuple[list[dict[str, Any]], int]:
    """Return the handlers with the most messages, and how many others there are."""
    counted = (
        (names, each)
        for names, each in figures.handlers.items()
        # Messages that were split among their handlers have no handler, and only arrived.
        if names[1] or each.acked or each.failed or each.dead
    )
    ordered = sorted(
        counted,
        key=lambda item: (-(item[1].acked + item[1].failed + item[1].dead), item[0]),
    )
    shown = [
        {
            "queue": queue,
            "handler": excerpt(handler),
            "counts": [f"{count:,}" for count in (each.acked, each.failed, each.dead)],
            "latencies": [_percentiles(each.waited), _percentiles(each.ran)],
        }
        for (queue, handler), each in ordered[:maximum]
    ]
    return shown, max(0, len(ordered) - maximum)


#: The counts of a step, in this order.
STEP_LABELS = ("in", "acked", "retried", "dead")


def step_rows(figures: queues.Figures) -> list[dict[str, Any]]:
    """Return the steps with data, the latest first: the data of the charts as a table."""
    found = []
    for at, each in reversed(figures.steps.items()):
        counts = (each.broadcast, each.acked, each.retried, each.dead)
        if any(counts):
            texts = [f"{count:,}" for count in counts]
            row = {
                "at": step_time(at, figures),
                "labelled": list(zip(STEP_LABELS, texts, strict=True)),
                "latencies": [_percentiles(each.waited), _percentiles(each.ran)],
            }
            found.append(row)
    return found


def workers_panel(found: Iterable[queues.WorkerProcess], url: str) -> dict[str, Any]:
    """Return how many workers are alive, how busy they are, and the names of vanished ones."""
    workers = list(found)
    alive = [each for each in workers if each.alive]
    busy = [each.busy for each in alive if each.claims and each.busy is not None]
    return {
        "alive": len(alive),
        "draining": sum(each.draining for each in alive),
        "quiet": sum(each.quiet and not each.draining for each in alive),
        "degraded": sum(each.wakeup == "degraded" for each in alive),
        "gone": [f"{each.host}:{each.pid}" for each in workers if not each.alive][:5],
        "url": url,
        "running": sum(len(each.running) for each in alive),
        "busy": f"{mean(busy):.0%}" if busy else "",
    }


def _percentiles(found: Latency | None) -> list[str]:
    """Return the percentiles as text, nothing without data."""
    return (
        [precise_span(found.p50), precise_span(found.p95), precise_span(found.p99)] if found else []
    )


def per(rate: float) -> str:
    """Return messages per second as text, or per minute or per hour if they are few.

    >>> per(1234.5), per(12.34), per(0.5), per(0.001), per(0.0)
    ('1,234/s', '12.3/s', '30/min', '3.6/h', '')
    """
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if rate * factor >= 1:
            value = rate * factor
            return f"{value:,.0f}/{unit}" if value >= 100 else f"{value:.3g}/{unit}"
    return ""
