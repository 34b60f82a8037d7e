"""The figures of real processes: a killed process loses only figures that it has not stored yet."""

from __future__ import annotations

import signal
from collections.abc import Callable

from django.db.models import Sum

from django_mq import queues
from django_mq.models import MinuteFigures
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker


def test_a_killed_process_and_its_replacement(start: Callable[..., Worker], queue: Queue) -> None:
    worker = start()
    queue.send("write", *[f"before{n}" for n in range(6)])
    worker.until(lambda: queue.done().total() == 6, "the first process handled them")
    worker.kill_child(0)
    queue.send("write", *[f"after{n}" for n in range(5)])
    worker.until(lambda: queue.done().total() == 11, "its replacement handled the others")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    by_worker = MinuteFigures.objects.values("worker").annotate(
        n=Sum("acked"), new=Sum("broadcast")
    )
    counts = sorted((each["n"], each["new"]) for each in by_worker)
    assert counts[-1] == (5, 5) or counts == [(5, 5), (6, 6)]
    total = queues.figures(queue="work").total
    assert total.acked in range(5, 12)
    assert total.broadcast == total.ran.count == total.acked  # type: ignore[union-attr]
