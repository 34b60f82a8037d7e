"""A coroutine that blocks its event loop holds up no message while another process is free."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker


@pytest.mark.slow
def test_sibling_process_runs_all_other_messages(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Messages from before the block, from soon after it, and from after it was noticed."""
    before = [f"before{n}" for n in range(20)]
    [blocks] = queue.send("ablockloop", "blocks", gate="open")
    queue.send("abrief", *before)
    worker = start("--queue", "acalls", "--processes", 2)
    worker.until(lambda: witness.started("blocks"), "a blocked loop")
    [(_, _, pid)] = witness.started("blocks")
    later = [f"later{n}" for n in range(20)]
    for name in later:
        queue.send("abrief", name)
    worker.until(lambda: [each.pk for each in queue.left()] == [blocks], "only the one that blocks")
    worker.says(rf"blocks the event loop: .*message {blocks} \(queue acalls, .*ablockloop")
    last = [f"last{n}" for n in range(20)]
    for name in last:
        queue.send("abrief", name)
    worker.until(lambda: [each.pk for each in queue.left()] == [blocks], "only the one that blocks")
    ran = [(name, attempt) for name, attempt, _ in witness.started() if name != "blocks"]
    assert sorted(ran) == sorted((name, 1) for name in [*before, *later, *last])
    assert pid not in {pid for name, _, pid in witness.started() if name in (*later, *last)}
    witness.open("open")
    queue.wait_empty(worker)
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
