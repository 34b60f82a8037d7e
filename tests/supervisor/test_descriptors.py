"""Supervisors and children wait for descriptors, whatever their numbers."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from django_mq.supervisor import child, link_lines
from django_mq.supervisor.descriptors import wait_ready
from django_mq.supervisor.stop_signals import StopSignals
from django_mq.worker import Worker
from tests.supervisor.links import dead, linked
from tests.supervisor.test_passing_on import supervisor_of
from tests.waiting import SOON, until

#: The first number that select.select() refuses.
BEYOND = 1024


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def moved(link: socket.socket) -> socket.socket:
    """Return the link with a number as in a process with many open files."""
    with link:
        return socket.socket(fileno=fcntl.fcntl(link.fileno(), fcntl.F_DUPFD_CLOEXEC, BEYOND))


def test_a_supervisor_of_more_processes_than_select_can_watch() -> None:
    supervisor = supervisor_of(1)
    [slot] = supervisor._slots
    with StopSignals() as signals, linked(slot) as process:
        supervisor._signals = signals
        assert slot.link is not None
        slot.link = moved(slot.link)
        process.sendall(link_lines.FINISHED + b"\n")
        supervisor._wait()
        assert slot.last_line == link_lines.FINISHED


def test_a_child_of_such_a_supervisor() -> None:
    worker = Worker()
    ours, theirs = socket.socketpair()
    with StopSignals() as signals, ours, moved(theirs) as link:
        listening = threading.Thread(target=child._listen, args=(worker, link, signals))
        listening.start()
        try:
            ours.sendall(link_lines.encode_dead(dead(2)))
            until(lambda: worker.to_recover)
        finally:
            ours.close()
            listening.join(SOON)
    assert worker.stopping.is_set()


def test_ready_descriptors_are_returned() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        both = {ours.fileno(), theirs.fileno()}
        assert wait_ready(both, seconds=0) == (set(), set())
        ours.send(b"x")
        assert wait_ready(both, both) == ({theirs.fileno()}, both)
        ours.close()
        theirs.recv(1)
        assert wait_ready([theirs.fileno()]) == ({theirs.fileno()}, set())
