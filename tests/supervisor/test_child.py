"""A child listens to its supervisor and to signals, whatever it reads."""

from __future__ import annotations

import socket
import threading

import pytest

from django_mq.supervisor import child, link_lines
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
