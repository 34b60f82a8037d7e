"""The output of a worker at its start, and for each message."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker


def test_the_queues_and_handlers_that_it_serves(start: Callable[..., Worker], queue: Queue) -> None:
    worker = start("--queue", "work", "--queue", "wrok", "--queue", "wrok.#", "-v", 2)
    worker.has_started(1)
    [id] = queue.send("write", "m")
    queue.wait_empty(worker)
    worker.says(f"message {id} .* acked after")
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
    said = worker.said()
    assert re.search(r"^QUEUE +HANDLER +TYPES$", said, re.MULTILINE)
    assert re.search(r"^work +\S+write +acceptance\.write$", said, re.MULTILINE)
    assert "names the queue 'wrok', and it has no messages: did you mean 'work'?" in said
    assert "no queue that has handlers here or messages matches 'wrok.#': did you mean" in said
    assert len(re.findall(f"message {id} ", said)) == 1


def test_silence(start: Callable[..., Worker], queue: Queue) -> None:
    queue.send("write", "m")
    worker = start("-v", 0, "--until-empty")
    assert worker.ends() == 0
    said = worker.said()
    assert "QUEUE" not in said
    assert " INFO " not in said  # whatever the level in LOGGING
