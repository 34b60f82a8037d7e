"""The server hangs: it neither closes its connections nor answers on them. Guarantee 6."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from django.db import connection

from tests.acceptance.conftest import Queue, database_url
from tests.acceptance.processes import SOON, Worker
from tests.worker.proxy import Proxy


@pytest.fixture
def still(empty_tables: None) -> Iterator[Proxy]:
    proxy = Proxy(connection.get_connection_params())
    yield proxy
    proxy.close()


@pytest.mark.slow
def test_an_idle_worker_leaves_at_once(
    start: Callable[..., Worker], queue: Queue, still: Proxy
) -> None:
    """The process waits neither for its statements' time limit nor for the end of the drain."""
    url = database_url(host="127.0.0.1", port=still.port)
    worker = start("--processes", 2, "--drain-seconds", 10 * SOON, url=url)
    queue.send("write", "before")
    queue.wait_empty(worker)
    still.hold(True)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    assert "Traceback" not in worker.said()


@pytest.mark.slow
def test_worker_continues_when_the_server_does(
    start: Callable[..., Worker], queue: Queue, still: Proxy
) -> None:
    """A pause shorter than the limits costs only its own length."""
    url = database_url(host="127.0.0.1", port=still.port)
    worker = start(url=url)
    worker.has_started(1)
    still.hold(True)
    queue.send("write", "meanwhile")
    still.hold(False)
    queue.wait_empty(worker)
    assert queue.done() == {"meanwhile": 1}
    assert "database lost" not in worker.said()
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
