"""Links between a supervisor and children that the test plays."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from django_mq.messages import Fence
from django_mq.supervisor.process_slot import ProcessSlot
from django_mq.worker.recovery import DeadWorker
from tests.waiting import SOON


def dead(number: int, *, running: int = 1000) -> DeadWorker:
    lost = [Fence(id, 1, f"w{number}:1") for id in range(running)]
    return DeadWorker(f"w{number}", "was killed", lost=lost)


@contextmanager
def linked(slot: ProcessSlot) -> Iterator[socket.socket]:
    """Yield the child's end of the link of `slot`."""
    slot.prepare()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(SOON)
        slot.assign(os.getpid(), ours)
        yield theirs
        slot.close_link()


def fill(slot: ProcessSlot) -> list[str]:
    """Send until the process is unreachable; return what it accepted."""
    accepted: list[str] = []
    while slot.send(each := dead(len(accepted))):
        accepted.append(each.worker)
        assert len(accepted) < 10_000, "the buffer has no bound"
    return accepted
