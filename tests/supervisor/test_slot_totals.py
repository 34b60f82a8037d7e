"""The supervisor's sums for Prometheus: no counter decreases."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from django_mq.policy.handler_totals import HandlerTotals
from django_mq.supervisor.slot_totals import ChangedTotals, SlotTotals, exposed, summed


class Source(NamedTuple):
    queue: str
    handler: str


def tally(acked: int, *ran: float) -> HandlerTotals:
    found = HandlerTotals(acked=acked)
    found.ran.add(ran)
    return found


def test_process_sends_only_changed_totals() -> None:
    totals = {Source("q", "h"): tally(1, 0.5), Source("q", "i"): tally(2)}
    reports = ChangedTotals(lambda: totals)
    assert len(list(reports.changed())) == 2
    assert list(reports.changed()) == []
    totals[Source("q", "i")] = tally(3)
    [line] = reports.changed()
    heard = SlotTotals()
    heard.take(line)
    assert heard.by_source() == {("q", "i"): tally(3)}
    assert b"\n" not in line


def test_no_counter_falls_when_a_process_is_replaced() -> None:
    totals, other = SlotTotals(), SlotTotals()
    [first] = ChangedTotals(lambda: {Source("q", "h"): tally(5, 0.5, 5000.0)}).changed()
    [second] = ChangedTotals(lambda: {Source("q", "h"): tally(1, 0.002)}).changed()
    totals.take(first)
    totals.take(first)  # totals: reading them twice counts them once
    totals.next_process()
    assert totals.by_source()["q", "h"].acked == 5
    totals.take(second)
    other.take(second)
    page = exposed(summed((totals.by_source(), other.by_source())), processes=2)
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
