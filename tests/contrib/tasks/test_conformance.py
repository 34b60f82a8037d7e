"""The backend keeps what Django's tasks promise, run by a worker."""

from __future__ import annotations

from django.test import TransactionTestCase

from django_mq.worker import Worker
from tests.contrib.tasks.conformance import TaskBackendConformance


class ConformanceTest(TaskBackendConformance, TransactionTestCase):
    """A real worker in this process: threads, an event loop, separate connections."""

    def run_tasks(self) -> None:
        assert Worker(max_seconds=60).run(until_empty=True)
