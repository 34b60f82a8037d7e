"""The messages that a worker process runs now, in memory that its supervisor can read.

Shared memory, not a pipe: a write costs a microsecond, and it survives the death of the process.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from time import monotonic
from typing import NamedTuple

from django_mq.messages import Fence, PlainFence

# id of the message, its attempt, the number of its claim, deadline (seconds of the system-wide
# monotonic clock; 0: none), whether a transaction undoes its writes. The id is written last and
# cleared first: an entry with an id is whole.
_ENTRY = struct.Struct("=qiqd?")
_ID = struct.Struct("=q")
_REST = struct.Struct("=iqd?")
_COUNT = struct.Struct("=q")
# By the same clock: until when each part that must move counts as moving; 0: it has not begun.
_MOVING = struct.Struct("=d")
_NOTHING = _ID.pack(0)


class Mover(IntEnum):
    """A part of a worker process that must not stand still."""

    LOOP = 0
    RENEWAL = 1


class Entry(NamedTuple):
    """A running message: its fence (with the worker's id), and its deadline."""

    fence: Fence
    deadline: float
    atomic: bool


class Scoreboard:
    """A table of `entries` entries in memory that is shared with children made by a fork."""

    def __init__(self, entries: int) -> None:
        self._size = max(1, entries) * _ENTRY.size
        self._memory = mmap.mmap(-1, self._size + _COUNT.size + len(Mover) * _MOVING.size)
        self._number = ("", 0)
        self.entries = entries

    @property
    def taken(self) -> int:
        """The number of messages claimed by all processes that wrote here."""
        count: int = _COUNT.unpack_from(self._memory, self._size)[0]
        return count

    def add_taken(self, count: int) -> None:
        """Add `count` claimed messages. Only one thread of one process may call this."""
        _COUNT.pack_into(self._memory, self._size, self.taken + count)

    def write(self, index: int, fence: PlainFence, deadline: float, atomic: bool) -> None:
        """Enter the message of `fence`, which runs until `deadline`, at `index`."""
        id, attempt, claimer = fence
        claim = self._number
        if claim[0] != claimer:  # neighbours are mostly of one claim
            claim = self._number = (claimer, int(claimer.rpartition(":")[2] or 0))
        at = index * _ENTRY.size
        _REST.pack_into(self._memory, at + _ID.size, attempt, claim[1], deadline, atomic)
        _ID.pack_into(self._memory, at, id)

    def clear(self, index: int) -> None:
        """Clear the id at `index`; the rest of the entry stays, for `used()`."""
        at = index * _ENTRY.size
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

    def used(self) -> bool:
        """Say whether any message has started since `wipe()`, even if it has ended."""
        return self._memory[: self._size] != bytes(self._size)

    def moved(self, mover: Mover, seconds: float) -> None:
        """Note that `mover` has moved, and must do so again within `seconds`."""
        at = self._size + _COUNT.size + mover * _MOVING.size
        _MOVING.pack_into(self._memory, at, monotonic() + seconds)

    def still(self) -> list[Mover]:
        """Return what began to move and has stood still for too long."""
        marks = _MOVING.iter_unpack(self._memory[self._size + _COUNT.size :])
        now = monotonic()
        return [mover for mover, (until,) in zip(Mover, marks, strict=True) if 0 < until < now]

    def wipe(self) -> None:
        """Clear all entries for the next process that writes here, but keep `taken`."""
        self._memory[: self._size] = bytes(self._size)
        begin = self._size + _COUNT.size
        self._memory[begin:] = bytes(len(self._memory) - begin)


class ExecutorEntries:
    """The entries of one executor: `count` from `first` on, one per message of a batch."""

    def __init__(self, scoreboard: Scoreboard, first: int, count: int) -> None:
        self._scoreboard = scoreboard
        self._first = first
        self._count = count

    def start(self, fences: Sequence[Fence], deadline: float, atomic: bool) -> None:
        """Enter the messages of a batch."""
        for offset, fence in enumerate(fences[: self._count]):
            self._scoreboard.write(self._first + offset, fence, deadline, atomic)

    def of_call(self, fences: Sequence[Fence]) -> CallEntries:
        """Return the entries of one call outside any transaction, not yet written."""
        first = self._first
        return CallEntries(self._scoreboard, range(first, first + self._count), fences)

    def start_one(self, fence: PlainFence, deadline: float, atomic: bool) -> None:
        """Enter one message."""
        self._scoreboard.write(self._first, fence, deadline, atomic)

    def end(self, count: int) -> None:
        """Clear the `count` entries that were made last."""
        if count == 1:
            self._scoreboard.clear(self._first)
            return
        for offset in range(min(count, self._count)):
            self._scoreboard.clear(self._first + offset)


class CallEntries:
    """The entries of the messages of one call outside any transaction. Thread-safe.

    If the process dies, those with an entry are charged. An answered message leaves, except the
    last of them: a call that always kills its process must end after so many attempts, too.
    """

    def __init__(
        self, scoreboard: Scoreboard, places: Sequence[int], fences: Sequence[Fence]
    ) -> None:
        self._scoreboard = scoreboard
        self._entries = {fence.id: (at, fence) for at, fence in zip(places, fences, strict=False)}
        self._lock = threading.Lock()

    def show(self, deadline: float) -> None:
        """Enter the messages, which run until `deadline`."""
        with self._lock:
            for at, fence in self._entries.values():
                self._scoreboard.write(at, fence, deadline, False)

    def answered(self, id: int) -> None:
        """Clear the entry of an answered message, unless it is the only one."""
        with self._lock:
            if id in self._entries and len(self._entries) > 1:
                self._scoreboard.clear(self._entries.pop(id)[0])

    def end(self) -> None:
        """Clear the entries: the call has ended."""
        with self._lock:
            for at, _ in self._entries.values():
                self._scoreboard.clear(at)
            self._entries.clear()
