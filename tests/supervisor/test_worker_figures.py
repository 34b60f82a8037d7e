"""The supervisor's sums for Prometheus: no counter decreases."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from django_mq.policy.handler_stats import HandlerTotals
from django_mq.supervisor.worker_figures import ChangedTotals, WorkerFigures, exposed, summed


class Source(NamedTuple):
    queue: str
    handler: str


def tally(acked: int, *ran: float) -> HandlerTotals:
    found = HandlerTotals(acked=acked)
    found.ran.add(ran)
    return found


def test_a_process_sends_what_changed() -> None:
    totals = {Source("q", "h"): tally(1, 0.5), Source("q", "i"): tally(2)}
    reports = ChangedTotals(lambda: totals)
    assert len(list(reports.changed())) == 2
    assert list(reports.changed()) == []
    totals[Source("q", "i")] = tally(3)
    [line] = reports.changed()
    heard = WorkerFigures()
    heard.take(line)
    assert heard.totals() == {("q", "i"): tally(3)}
    assert b"\n" not in line


def test_no_counter_falls_when_a_process_is_replaced() -> None:
    figures, other = WorkerFigures(), WorkerFigures()
    [first] = ChangedTotals(lambda: {Source("q", "h"): tally(5, 0.5, 5000.0)}).changed()
    [second] = ChangedTotals(lambda: {Source("q", "h"): tally(1, 0.002)}).changed()
    figures.take(first)
    figures.take(first)  # totals: reading them twice counts them once
    figures.next_process()
    assert figures.totals()["q", "h"].acked == 5
    figures.take(second)
    other.take(second)
    page = exposed(summed((figures.totals(), other.totals())), processes=2)
    values = {
        (each.name, each.labels.get("outcome") or each.labels.get("le")): each.value
        for family in text_string_to_metric_families(page)
        for each in family.samples
    }
    assert values["django_mq_handled_total", "acked"] == 7
    assert values["django_mq_run_seconds_count", None] == 4
    assert values["django_mq_run_seconds_bucket", "0.001"] == 0
    assert values["django_mq_run_seconds_bucket", "1.0"] == 3
    assert values["django_mq_run_seconds_bucket", "+Inf"] == 4
    assert round(values["django_mq_run_seconds_sum", None], 3) == 5000.504
    assert values["django_mq_worker_processes", None] == 2
