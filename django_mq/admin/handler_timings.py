"""The table of handlers with their timings on the pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from django_mq import queues
from django_mq.admin.seen_handlers import seen_handlers
from django_mq.admin.texts import excerpt
from django_mq.policy.durations import precise_span
from django_mq.policy.histogram import Durations

COUNTED = ("acked", "failed", "retried", "snoozed", "dead")


def timing_rows(
    found: Iterable[queues.HandlerTimings], allowed: Collection[str] | None
) -> list[dict[str, Any]]:
    """Return a row for each handler that takes from one of the `allowed` queues (None: any)."""
    known = None if allowed is None else {each.name for each in seen_handlers(allowed)}
    return [
        {
            "handler": excerpt(each.handler),
            "counts": [(name.capitalize(), f"{getattr(each, name):,}") for name in COUNTED],
            "durations": (("Waited", _shown(each.waited)), ("Ran", _shown(each.ran))),
        }
        for each in found
        if known is None or each.handler in known
    ]


def _shown(found: Durations | None) -> dict[str, str] | None:
    """Return the median, the 99th percentile, and a summary of the other statistics."""
    if found is None:
        return None
    summary = (
        f"last {precise_span(found.last)},"
        f" from {precise_span(found.min)} to {precise_span(found.max)},"
        f" mean {precise_span(found.mean)}, deviation {precise_span(found.deviation)},"
        f" 90th percentile {precise_span(found.p90)}"
    )
    return {"p50": precise_span(found.p50), "p99": precise_span(found.p99), "summary": summary}
