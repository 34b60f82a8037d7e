"""Figures of the queues for Prometheus, read from the database: needs the extra `prometheus`.

Register `QueueCollector` with any registry, or route a URL to `views.metrics`. The counters and
histograms of the handlers come from the workers: `mq_worker --metrics-port`.
"""

from django_mq.contrib.prometheus.collector import QueueCollector

__all__ = ["QueueCollector"]
