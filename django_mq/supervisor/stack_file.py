"""The stacks of a child that is about to be ended, in memory that its supervisor reads.

A signal makes `faulthandler` write them. That works even while C code holds the interpreter's lock
and no thread of the child can run. A child that has ended can no longer be asked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from django_mq.policy.stack import Frame, parse_dump

#: Bytes of a dump that are read: 100 threads of 100 frames, the limits of faulthandler.
MAX_DUMP_BYTES = 2 * 1024 * 1024
#: Seconds without another byte after which a dump is complete: it has no end mark.
COMPLETE_AFTER = 0.1
#: Seconds that a child has for its dump: a busy machine may not run it at once, or not at all.
MAX_SECONDS = 2.0
#: A real-time signal, which programs rarely use. On a system without one, there are no stacks.
SIGNAL: int = getattr(signal, "SIGRTMIN", 0) and signal.SIGRTMIN + 7


class StackFile:
    """A file in memory, shared with children made by a fork."""

    def __init__(self) -> None:
        self._fd = -1
        self._asked_at = self._grew_at = 0.0
        self._size = 0
        if SIGNAL and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may refuse it
                self._fd = os.memfd_create("mq-stacks")

    def serve(self) -> None:
        """In the child: write the stacks of all threads on each request from now on."""
        if self._fd >= 0:
            faulthandler.register(SIGNAL, file=self._fd, all_threads=True, chain=False)

    def ask(self, pid: int, now: float) -> None:
        """Ask process `pid` for its stacks; it writes them within milliseconds, if it can."""
        self._asked_at = self._grew_at = now
        self._size = 0
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)  # the offset is shared with the child
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)

    def answered(self, thread: int, now: float) -> bool:
        """Return whether the dump is complete and has `thread`, or is no longer awaited.

        A `thread` of 0 is unknown.
        """
        if self._fd < 0 or now >= self._asked_at + MAX_SECONDS:
            return True
        size = os.fstat(self._fd).st_size
        if size > self._size:
            self._size, self._grew_at = size, now
        return now >= self._grew_at + COMPLETE_AFTER and (not thread or thread in self.read())

    def read(self) -> dict[int, list[Frame]]:
        """Return the calls of each thread, as far as the child has written them."""
        if self._fd < 0:
            return {}
        return parse_dump(os.pread(self._fd, MAX_DUMP_BYTES, 0).decode(errors="replace"))

    def wipe(self) -> None:
        """Forget the stacks that another process wrote."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
