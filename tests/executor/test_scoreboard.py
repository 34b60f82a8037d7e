"""The scoreboard: the running messages of a process, as its supervisor reads them."""

from __future__ import annotations

import os

import pytest

from django_mq.executor.scoreboard import Entry, Scoreboard
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.messages import Fence
from django_mq.worker import Worker


def test_an_entry_is_read_as_it_was_written() -> None:
    scoreboard = Scoreboard(4)
    big = Fence(2**62, 2**31 - 1, f"me:{2**62}")
    scoreboard.write(2, big, 12.5, True)
    scoreboard.write(0, Fence(7, 1, "me:3"), 0.0, False)
    assert list(scoreboard.read("other")) == [
        Entry(Fence(7, 1, "other:3"), 0.0, False),
        Entry(big._replace(claimed_by=f"other:{2**62}"), 12.5, True),
    ]
    assert scoreboard.running() == [7, 2**62]
    scoreboard.clear(0)
    assert scoreboard.running() == [2**62]
    scoreboard.wipe()
    assert list(scoreboard.read("me")) == []


def test_it_knows_whether_it_was_used_since_it_was_wiped() -> None:
    scoreboard = Scoreboard(2)
    assert not scoreboard.used()
    scoreboard.add_claimed(3)  # taken, but not started
    assert not scoreboard.used()
    scoreboard.write(1, Fence(7, 1, "me:3"), 0.0, False)
    scoreboard.clear(1)
    assert scoreboard.used()
    scoreboard.wipe()
    assert not scoreboard.used()


def test_places_are_those_of_one_executor() -> None:
    scoreboard = Scoreboard(6)
    first, second = ExecutorEntries(scoreboard, 0, 3), ExecutorEntries(scoreboard, 3, 3)
    second.start([Fence(n, 1, "me:1") for n in (4, 5)], 1.0, 0.0)
    first.start([Fence(n, 1, "me:1") for n in (1, 2, 3, 99)], 1.0, 0.0)  # one too many
    assert scoreboard.running() == [1, 2, 3, 4, 5]
    first.end(4)
    assert scoreboard.running() == [4, 5]
    second.end(2)
    assert scoreboard.running() == []


def test_a_forked_child_writes_where_its_parent_reads() -> None:
    """This includes entries from just before it was killed."""
    scoreboard = Scoreboard(1)
    pid = os.fork()
    if pid == 0:
        scoreboard.write(0, Fence(7, 1, "child:3"), 1.0, True)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert [entry.fence.id for entry in scoreboard.read("child")] == [7]


@pytest.mark.parametrize(("threads", "slots", "batch", "entries"), [(1, 1, 1, 2), (3, 10, 5, 25)])
def test_entries_needed(threads: int, slots: int, batch: int, entries: int) -> None:
    worker = Worker(threads=threads, async_slots=slots, batch_size=batch)
    assert worker.entries_needed() == entries
