"""What a worker process runs at this moment, written where its supervisor can read it.

Shared memory and not a pipe: a write costs a microsecond, and what was written is still there
when the process was killed in the middle of it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from django_mq.messages import Fence, PlainFence

# id of the message, its attempt, the number of its claim, deadline (seconds of the system-wide
# monotonic clock; 0: none), whether its transaction undoes it. The id is written last and
# cleared first: an entry with an id is whole.
_ENTRY = struct.Struct("=qiqd?")
_ID = struct.Struct("=q")
_REST = struct.Struct("=iqd?")
_COUNT = struct.Struct("=q")
_NOTHING = _ID.pack(0)


class Entry(NamedTuple):
    """One message that runs: its fence (with the worker's id), and when its time is over."""

    fence: Fence
    deadline: float
    atomic: bool


class Board:
    """A table of `places` entries in memory that is shared with children made by a fork."""

    def __init__(self, places: int) -> None:
        self._size = max(1, places) * _ENTRY.size
        self._memory = mmap.mmap(-1, self._size + _COUNT.size)
        self._number = ("", 0)
        self.places = places

    @property
    def taken(self) -> int:
        """How many messages were claimed by all processes that wrote here."""
        count: int = _COUNT.unpack_from(self._memory, self._size)[0]
        return count

    def add_taken(self, count: int) -> None:
        """So many messages were claimed: only one thread of one process may call it."""
        _COUNT.pack_into(self._memory, self._size, self.taken + count)

    def write(self, place: int, fence: PlainFence, deadline: float, atomic: bool) -> None:
        """Say that the message of `fence` runs at `place` until `deadline`."""
        id, attempt, claimer = fence
        claim = self._number
        if claim[0] != claimer:  # neighbours are mostly of one claim
            claim = self._number = (claimer, int(claimer.rpartition(":")[2] or 0))
        at = place * _ENTRY.size
        _REST.pack_into(self._memory, at + _ID.size, attempt, claim[1], deadline, atomic)
        _ID.pack_into(self._memory, at, id)

    def clear(self, place: int) -> None:
        """Nothing runs at `place` any more."""
        at = place * _ENTRY.size
        self._memory[at : at + _ID.size] = _NOTHING

    def read(self, worker: str) -> Iterator[Entry]:
        """Yield what runs, as fences of worker process `worker`."""
        data = self._memory[: self._size]
        for id, attempt, claim_number, deadline, atomic in _ENTRY.iter_unpack(data):
            if id:
                yield Entry(Fence(id, attempt, f"{worker}:{claim_number}"), deadline, atomic)

    def running(self) -> list[int]:
        """The ids of the messages that run."""
        return [entry.fence.id for entry in self.read("")]

    def wipe(self) -> None:
        """Clear every place: for the next process that writes here. What was taken stays."""
        self._memory[: self._size] = bytes(self._size)


class Places:
    """The places of one executor: `first` on, as many as a slice of a batch handler needs."""

    def __init__(self, board: Board, first: int, count: int) -> None:
        self._board = board
        self._first = first
        self._count = count

    def start(self, fences: Sequence[Fence], deadline: float, atomic: bool) -> None:
        """These messages start, together."""
        for offset, fence in enumerate(fences[: self._count]):
            self._board.write(self._first + offset, fence, deadline, atomic)

    def start_one(self, fence: PlainFence, deadline: float, atomic: bool) -> None:
        """This message starts, alone."""
        self._board.write(self._first, fence, deadline, atomic)

    def end(self, count: int) -> None:
        """The `count` messages that started last are over."""
        if count == 1:
            self._board.clear(self._first)
            return
        for offset in range(min(count, self._count)):
            self._board.clear(self._first + offset)
