"""The messages that a worker process runs now, in memory that its supervisor can read.

Shared memory, not a pipe: a write takes a microsecond, and it survives the death of the process.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from time import monotonic
from typing import NamedTuple

from django_mq.messages import Fence, PlainFence

# The fields: id of the message, its attempt, the number of its claim, deadline (seconds of the
# system-wide monotonic clock; infinity: none), whether a transaction undoes its writes, when it
# began. The id is written last and cleared first, so that an entry with an id is complete.
_ENTRY = struct.Struct("=qiqd?d")
_ID = struct.Struct("=q")
_REST = struct.Struct("=iqd?d")
_DEADLINE = struct.Struct("=d")
_DEADLINE_AT = struct.calcsize("=qiq")
_COUNT = struct.Struct("=q")
# When a monitored part counts as stalled unless it has moved again, by the same clock; 0: the part
# has not begun.
_STALLED_AT = struct.Struct("=d")
# The identifier of the thread that runs an entry and those after it; 0: as in the entry before.
_THREAD = struct.Struct("=Q")
_NOTHING = _ID.pack(0)


class MonitoredPart(IntEnum):
    """A part of a worker process that must not stall."""

    LOOP = 0
    RENEWAL = 1
    LISTENER = 2
    #: Moves while the database answers; a worker without it is alive, but not ready.
    DATABASE = 3
    #: Moves with each stored heartbeat; the same holds for it.
    HEARTBEAT = 4


class Entry(NamedTuple):
    """A running message: its fence (with the worker's id), its deadline, and when it began.

    `thread` is the identifier of the thread that runs it, 0 if unknown.
    """

    fence: Fence
    deadline: float
    atomic: bool
    began: float = 0.0
    thread: int = 0


class Scoreboard:
    """A table of `entries` entries in memory that is shared with children made by a fork."""

    def __init__(self, entries: int) -> None:
        self._size = max(1, entries) * _ENTRY.size
        self._threads_at = self._size + _COUNT.size + len(MonitoredPart) * _STALLED_AT.size
        self._memory = mmap.mmap(-1, self._threads_at + max(1, entries) * _THREAD.size)
        self._number = ("", 0)
        self.entries = entries

    @property
    def claimed(self) -> int:
        """The number of messages claimed by all processes that wrote here."""
        count: int = _COUNT.unpack_from(self._memory, self._size)[0]
        return count

    def add_claimed(self, count: int) -> None:
        """Add `count` claimed messages. Only one thread of one process may call this."""
        _COUNT.pack_into(self._memory, self._size, self.claimed + count)

    def write(
        self, index: int, fence: PlainFence, deadline: float, atomic: bool, began: float = 0.0
    ) -> None:
        """Enter the message of `fence`, which runs until `deadline`, at `index`."""
        id, attempt, claimer = fence
        claim = self._number
        if claim[0] != claimer:  # neighbours mostly have the same claim
            claim = self._number = (claimer, int(claimer.rpartition(":")[2] or 0))
        at = index * _ENTRY.size
        _REST.pack_into(self._memory, at + _ID.size, attempt, claim[1], deadline, atomic, began)
        _ID.pack_into(self._memory, at, id)

    def set_deadline(self, index: int, deadline: float) -> None:
        """Change the deadline of the message at `index`."""
        _DEADLINE.pack_into(self._memory, index * _ENTRY.size + _DEADLINE_AT, deadline)

    def bind_thread(self, *indexes: int, thread: int = 0) -> None:
        """Note that `thread` runs the entries from each index on, up to the next such note.

        The default is this thread.
        """
        ident = thread or threading.get_ident()
        for index in indexes:
            _THREAD.pack_into(self._memory, self._threads_at + index * _THREAD.size, ident)

    def clear(self, index: int) -> None:
        """Clear the id at `index`; the rest of the entry stays, for `used()`."""
        at = index * _ENTRY.size
        self._memory[at : at + _ID.size] = _NOTHING

    def read(self, worker: str) -> Iterator[Entry]:
        """Yield the running messages, with fences of worker process `worker`."""
        data = self._memory[: self._size]
        for index, entry in enumerate(_ENTRY.iter_unpack(data)):
            id, attempt, claim_number, deadline, atomic, began = entry
            if id:
                fence = Fence(id, attempt, f"{worker}:{claim_number}")
                yield Entry(fence, deadline, atomic, began, self._thread(index))

    def _thread(self, index: int) -> int:
        for at in range(index, -1, -1):
            noted: int = _THREAD.unpack_from(self._memory, self._threads_at + at * _THREAD.size)[0]
            if noted:
                return noted
        return 0

    def running(self) -> list[int]:
        """The ids of the messages that run."""
        return [entry.fence.id for entry in self.read("")]

    def running_for(self) -> dict[int, float]:
        """The seconds that each running message has run, by id; 0 if unknown."""
        now = monotonic()
        return {
            each.fence.id: round(now - each.began, 3) if each.began else 0.0
            for each in self.read("")
        }

    def used(self) -> bool:
        """Return whether any message has started since `wipe()`, even if it has ended."""
        return self._memory[: self._size] != bytes(self._size)

    def record_progress(self, part: MonitoredPart, seconds: float) -> None:
        """Record that `part` has moved; it must move again within `seconds`."""
        at = self._size + _COUNT.size + part * _STALLED_AT.size
        _STALLED_AT.pack_into(self._memory, at, monotonic() + seconds)

    def stalled(self) -> list[MonitoredPart]:
        """Return the parts that began to move and have stalled."""
        now = monotonic()
        return [part for part, until in self._marks() if 0 < until < now]

    def progresses(self, part: MonitoredPart) -> bool:
        """Return whether `part` has begun to move and is not stalled."""
        return dict(self._marks())[part] >= monotonic()

    def _marks(self) -> Iterator[tuple[MonitoredPart, float]]:
        marks = _STALLED_AT.iter_unpack(self._memory[self._size + _COUNT.size : self._threads_at])
        return ((part, until) for part, (until,) in zip(MonitoredPart, marks, strict=True))

    def wipe(self) -> None:
        """Clear all entries for the next process that writes here, but keep `claimed`."""
        self._memory[: self._size] = bytes(self._size)
        begin = self._size + _COUNT.size
        self._memory[begin:] = bytes(len(self._memory) - begin)
