"""A process dies while it runs a list of messages outside any transaction."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.acceptance.test_crashes import PROMPT


def test_a_killed_process_charges_those_without_a_verdict(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Guarantees 1, 3: they run singly afterwards; the one with a verdict is not charged."""
    decided = queue.send("list", "a", gate="open", fails=True)
    others = queue.send("list", *"bcd", gate="open")
    worker = start("--processes", 1, "--threads", 1)
    worker.until(lambda: len(witness.started()) == 4, "one call has all four")
    [pid] = {pid for _, _, pid in witness.started()}

    os.kill(pid, signal.SIGKILL)

    worker.until(lambda: all(map(queue.failures, others)), "the attempts are charged", PROMPT)
    assert queue.failures(decided[0]) == []
    witness.open("open")
    queue.wait_empty(worker, PROMPT)
    assert [queue.failures(id) for id in others] == [["WorkerLost"]] * 3
    assert queue.failures(decided[0]) == ["ValueError"]  # its own verdict, in its second run
    ran = Counter((name, attempt) for name, attempt, _ in queue.effects())
    assert ran == {
        ("a", 1): 2,
        ("a", 2): 1,
        **{(name, attempt): 1 for name in "bcd" for attempt in (1, 2)},
    }
