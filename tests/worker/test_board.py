"""The board: what a process runs, as its supervisor reads it."""

from __future__ import annotations

import os

import pytest

from django_mq.messages import Fence
from django_mq.worker import places_needed
from django_mq.worker.board import Board, Entry, Places


def test_an_entry_is_read_as_it_was_written() -> None:
    board = Board(4)
    big = Fence(2**62, 2**31 - 1, f"me:{2**62}")
    board.write(2, big, 12.5, True)
    board.write(0, Fence(7, 1, "me:3"), 0.0, False)
    assert list(board.read("other")) == [
        Entry(Fence(7, 1, "other:3"), 0.0, False),
        Entry(big._replace(claimed_by=f"other:{2**62}"), 12.5, True),
    ]
    assert board.running() == [7, 2**62]
    board.clear(0)
    assert board.running() == [2**62]
    board.wipe()
    assert list(board.read("me")) == []


def test_places_are_those_of_one_executor() -> None:
    board = Board(6)
    first, second = Places(board, 0, 3), Places(board, 3, 3)
    second.start([Fence(n, 1, "me:1") for n in (4, 5)], 1.0, True)
    first.start([Fence(n, 1, "me:1") for n in (1, 2, 3, 99)], 1.0, True)  # one more than places
    assert board.running() == [1, 2, 3, 4, 5]
    first.end(4)
    assert board.running() == [4, 5]
    second.end(2)
    assert board.running() == []


def test_a_forked_child_writes_where_its_parent_reads() -> None:
    """Also what it wrote just before it was killed."""
    board = Board(1)
    pid = os.fork()
    if pid == 0:
        board.write(0, Fence(7, 1, "child:3"), 1.0, True)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert [entry.fence.id for entry in board.read("child")] == [7]


@pytest.mark.parametrize(("threads", "slots", "batch", "places"), [(1, 1, 1, 2), (3, 10, 5, 25)])
def test_places_needed(threads: int, slots: int, batch: int, places: int) -> None:
    assert places_needed(threads=threads, async_slots=slots, batch_size=batch) == places
