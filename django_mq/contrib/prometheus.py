"""Figures of the queues for Prometheus, read from the database: needs the extra `prometheus`.

Register `QueueCollector` with any registry, or route a URL to `metrics`. The counters and
histograms of the handlers come from the workers: `mq_worker --metrics-port`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

try:
    from prometheus_client import CollectorRegistry
except ModuleNotFoundError as error:
    text = "this module needs prometheus_client: pip install 'django-mq[prometheus]'"
    raise ModuleNotFoundError(text, name=error.name) from error
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from django_mq import queues
from django_mq.conf import alias_of
from django_mq.executor.connections import closed_if_opened
from django_mq.queues import QueueCounts
from django_mq.queues.transactions import reading
from django_mq.states import MessageState
from django_mq.store import schedules
from django_mq.store.limits import Limits

__all__ = ["QueueCollector", "metrics"]

#: Seconds that one statement of a scrape may take, and seconds that it may wait for a lock.
SCRAPE_LIMITS = Limits(5.0, 1.0)
#: The states that are counted. A pause belongs to the queue.
STATES = tuple(state.value for state in MessageState if state is not MessageState.PAUSED)
#: The gauges by their labels: the name of each, and its help.
GAUGES = {
    ("queue", "state"): {
        "django_mq_messages": "Messages by state; beyond 10,000 an estimate.",
        "django_mq_messages_estimated": "1 while django_mq_messages is an estimate.",
    },
    ("queue",): {
        "django_mq_oldest_seconds": "How long the longest-due message has been due; 0 if none is.",
        "django_mq_queue_backoff_level": "How far the fleet eases off the queue; 0 is full rate.",
        "django_mq_queue_paused": "1 while it is paused.",
        "django_mq_queue_dead_head": "1 while a dead message blocks those behind it.",
        "django_mq_queue_max_in_flight": "The limit of messages in flight, if there is one.",
    },
    (): {
        "django_mq_schedule_overdue_seconds": "How long the longest-due schedule has been due; 0 if"
        " none is.",
        "django_mq_workers": "Worker processes alive, over the fleet.",
        "django_mq_threads": "Executor threads, over all live workers.",
        "django_mq_threads_used": "Executor threads in use, on average between two heartbeats.",
        "django_mq_slots": "Slots of async handlers, over all live workers.",
        "django_mq_slots_used": "Slots of async handlers in use, on average between two"
        " heartbeats.",
    },
}
#: The figures that are summed over the live workers, in the order of the last gauges.
USAGE = ("threads", "threads_used", "slots", "slots_used")


class QueueCollector(Collector):
    """Gauges of every known queue, of the schedules, and of the workers.

    A scrape takes a few statements, of at most 5 s each, however many messages wait: beyond 10,000
    it exports estimates, marked by `django_mq_messages_estimated`. Its cost is linear in the number
    of queues. An error of the database is raised: the scrape fails, and Prometheus reports that by
    `up`.
    """

    def __init__(self, using: str | None = None) -> None:
        self._using = using

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the names without querying the database, so that registering does not connect."""
        return [
            GaugeMetricFamily(name, help, labels=labels)
            for labels, gauges in GAUGES.items()
            for name, help in gauges.items()
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield all gauges as of now."""
        alias = alias_of(self._using)
        # An exporter may start a thread for each scrape.
        session = closed_if_opened(connections[alias])
        with session, reading(alias, limits=SCRAPE_LIMITS) as cursor:
            counted = queues.counts(using=alias)
            workers = queues.workers(using=alias)
            due_in = schedules.next_due(cursor)
        families = self.describe()
        messages, estimated, oldest, level, paused, dead_head, limit, overdue, alive, *usage = (
            families
        )
        for name, each in counted.items():
            for state in STATES:
                messages.add_metric([name, state], each.about(state))
                estimated.add_metric([name, state], each.is_capped(state))
            oldest.add_metric([name], _seconds(each))
            level.add_metric([name], each.backoff_level)
            paused.add_metric([name], each.paused)
            dead_head.add_metric([name], each.dead_head is not None)
            if each.max_in_flight is not None:
                limit.add_metric([name], each.max_in_flight)
        overdue.add_metric([], max(0.0, -(due_in or 0.0)))
        live = [worker for worker in workers if worker.alive]
        alive.add_metric([], len(live))
        for family, name in zip(usage, USAGE, strict=True):
            family.add_metric([], sum(getattr(worker, name) or 0.0 for worker in live))
        yield from families


def _seconds(counts: QueueCounts) -> float:
    return counts.oldest.total_seconds() if counts.oldest is not None else 0.0


@never_cache
@require_safe
def metrics(request: HttpRequest, using: str | None = None) -> HttpResponse:
    """Return the figures of all queues, in the format that the scraper accepts.

    It requires no login: protect it in your URL configuration.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(QueueCollector(using))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)


#: Projects import the view from `django_mq.contrib.prometheus.views`.
views = sys.modules[f"{__name__}.views"] = sys.modules[__name__]
