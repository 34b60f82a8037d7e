"""Prometheus reads the sum over a worker's processes, which never falls."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.acceptance.test_health import ask
from tests.ports import free_port


def handled(port: int) -> float:
    """Return the number of acked messages that Prometheus reads."""
    status, page = ask(port, "/metrics")
    if status != 200:
        return 0
    return sum(
        sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == "django_mq_handled_total" and sample.labels["outcome"] == "acked"
    )


@pytest.mark.thorough
def test_counters_of_all_processes_survive_a_kill(
    start: Callable[..., Worker], queue: Queue
) -> None:
    port = free_port()
    worker = start("--metrics-port", port, "--processes", 2)
    worker.has_started(2)
    queue.send("write", *(f"first-{n}" for n in range(20)))
    worker.until(lambda: handled(port) == 20, "all are counted")
    worker.kill_child(0, signal.SIGKILL)
    worker.has_started(3)
    assert handled(port) == 20
    queue.send("write", *(f"second-{n}" for n in range(5)))
    worker.until(lambda: handled(port) == 25, "those after the restart, too")
    assert ask(port, "/other")[0] == 404
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
