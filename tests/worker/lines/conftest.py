"""Queues with one line each, and a log of the runs in order."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from django_mq import RetryPolicy, fixed
from django_mq.models import QueuedMessage
from tests.rows import add, pks
from tests.worker.conftest import PATIENCE

AT_ONCE = RetryPolicy(max_attempts=50, backoff=fixed(0))
LATER = RetryPolicy(max_attempts=50, backoff=fixed(3600))


@pytest.fixture(autouse=True)
def _settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "POLL_INTERVAL": 0.2,  # no test waits for it; checks that nothing happens are shorter
        "RETRY_FLOOR": 0,
        "QUEUES": {
            "line": {"ordered": True},
            "mail": {},
            "easy": {"on_dead_head": "skip"},
            "commits": {"key_order": "commit"},
        },
    }


class Log:
    """The runs, in order, and any that overlapped with another run of their line."""

    def __init__(self) -> None:
        self.done: dict[str, list[int]] = defaultdict(list)
        self.order: list[int] = []
        self.overlaps: list[int] = []
        self.most = 0
        self._running: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def running(self, line: str, *ids: int) -> Iterator[None]:
        with self._changed:
            self.overlaps += ids if line in self._running else ()
            self._running.add(line)
            self.most = max(self.most, len(self._running))
        try:
            yield
        except BaseException:
            with self._changed:
                self._running.discard(line)
            raise
        with self._changed:
            self._running.discard(line)
            self.done[line] += ids
            self.order += ids
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) >= count, PATIENCE), self.order


@pytest.fixture
def log() -> Log:
    return Log()


def row(queue: str = "line", **given: Any) -> QueuedMessage:
    """Insert a message of an ordered queue, of handler h."""
    return add(queue, **{"handler": "h", "ordered": True, **given})


def keyed(key: str | None = "k", queue: str = "mail", **given: Any) -> QueuedMessage:
    return add(queue, **{"handler": "h", "key": key, **given})


def make_due(*messages: QueuedMessage) -> None:
    QueuedMessage.objects.filter(pk__in=pks(*messages)).update(
        processable_after="2000-01-01 00:00Z"
    )
    with connection.cursor() as cursor:
        cursor.execute("notify django_mq")


def empty() -> bool:
    return not QueuedMessage.objects.exists()
