"""A child listens to its supervisor and to signals, whatever it reads."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from django_mq.executor.scoreboard import Scoreboard
from django_mq.messages import Fence
from django_mq.supervisor import child, link_lines, process_slot
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.supervisor.stop_signals import StopSignals
from django_mq.worker import Worker
from tests.supervisor.links import dead
from tests.waiting import SOON, until


def test_a_child_outlives_a_line_that_it_cannot_read(caplog: pytest.LogCaptureFixture) -> None:
    """It goes on to listen: to the next request, and to the end of its supervisor."""
    worker = Worker()
    ours, theirs = socket.socketpair()
    with StopSignals() as signals, ours, theirs:
        listening = threading.Thread(target=child._listen, args=(worker, theirs, signals))
        listening.start()
        try:
            for line in (b'{"worker": "w0", "lo{"worker": "w1"}', b"{}", b"7", b"\xff"):
                ours.sendall(line + b"\n")
            ours.sendall(link_lines.encode_dead(dead(2)))
            until(lambda: worker.to_recover)
            assert [each.worker for each, _ in worker.to_recover] == ["w2"]
            assert not worker.stopping.is_set()
        finally:
            ours.close()
            listening.join(SOON)
    assert worker.stopping.is_set()
    assert not listening.is_alive()
    # A coroutine of an earlier test may say, as garbage, that it was pending.
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events.count("recovery_failed") == 4


@pytest.mark.parametrize(("after", "later"), [(0.0, child.SENDER_SECONDS), (3.0, 3.0)])
def test_a_stop_leaves_the_thread_that_asks_for_it_time_to_wait_again(
    monkeypatch: pytest.MonkeyPatch, after: float, later: float
) -> None:
    """A dump of the stacks while it runs may crash the process before the handler's is written."""
    monkeypatch.setattr(process_slot, "monotonic", lambda: 1000.0)
    slot, fence = ProcessSlot(Scoreboard(1)), Fence(7, 1, "w:1")
    ours, theirs = socket.socketpair()
    with theirs:
        slot.assign(os.getpid(), ours)
        child._ask_to_end(theirs, fence, "ana", after)
        assert slot.read_link()
        slot.close_link()
    assert slot.stopped == {fence: ("ana", 1000.0 + later)}
    assert later >= child.SENDER_SECONDS > 0
