"""The totals of the handlers of all processes, which the supervisor sums for Prometheus.

Each process sends the totals since its start that have changed. Totals of processes that have ended
are kept, so that no counter falls when a process is replaced. The counts of a killed process since
its last report are lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping

from django_mq.executor.minutes import FigureSource
from django_mq.policy.exposition import family, histogram
from django_mq.policy.handler_totals import HandlerTotals

#: Seconds between two reports of a process.
REPORT_SECONDS = 5.0
#: The outcomes of `django_mq_handled_total`.
OUTCOMES = ("acked", "retried", "snoozed", "dead")

#: By queue and handler.
Totals = dict[tuple[str, str], HandlerTotals]


class ChangedTotals:
    """The reports of one process: the totals that changed since the last report.

    `read()` returns the totals since the process started.
    """

    def __init__(self, read: Callable[[], Mapping[FigureSource, HandlerTotals]]) -> None:
        self._read = read
        self._sent: dict[FigureSource, HandlerTotals] = {}

    def changed(self) -> Iterator[bytes]:
        """Yield a line for each total that changed."""
        for source, total in self._read().items():
            if self._sent.get(source) != total:
                self._sent[source] = total
                yield json.dumps([source.queue, source.handler, total.as_json()]).encode()


class SlotTotals:
    """The totals of one slot of the supervisor: of its process, and of those before it."""

    def __init__(self) -> None:
        self._past: Totals = {}
        self._now: Totals = {}

    def take(self, line: bytes) -> None:
        """Take a line that `ChangedTotals` wrote."""
        queue, handler, written = json.loads(line)
        self._now[queue, handler] = HandlerTotals.from_json(written)

    def next_process(self) -> None:
        """Begin to count for another process."""
        self._past = summed((self._past, self._now))
        self._now = {}

    def by_source(self) -> Totals:
        """Return the totals of all processes that the slot has had."""
        return summed((self._past, self._now))


def summed(parts: Iterable[Totals]) -> Totals:
    """Return the sums by queue and handler."""
    sums: Totals = {}
    for part in parts:
        for source, total in part.items():
            sums.setdefault(source, HandlerTotals()).merge(total)
    return sums


def exposed(totals: Totals, *, processes: int) -> str:
    """Return the page that Prometheus reads."""
    by_labels = [
        ({"queue": queue, "handler": handler}, total)
        for (queue, handler), total in sorted(totals.items())
    ]
    return "".join(
        (
            family(
                "django_mq_worker_processes",
                "gauge",
                "Running processes of this mq_worker.",
                [({}, processes)],
            ),
            family(
                "django_mq_handled_total",
                "counter",
                "Attempts by their outcome, and messages that died without one.",
                (
                    ({**labels, "outcome": outcome}, getattr(total, outcome))
                    for labels, total in by_labels
                    for outcome in OUTCOMES
                ),
            ),
            histogram(
                "django_mq_wait_seconds",
                "Time from due to claimed, for first attempts only.",
                ((labels, total.waited) for labels, total in by_labels),
            ),
            histogram(
                "django_mq_run_seconds",
                "Time in the handler; a batch counts for each of its messages.",
                ((labels, total.ran) for labels, total in by_labels),
            ),
        )
    )
