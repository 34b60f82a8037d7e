"""Lines to a process, sent without waiting: a frozen process must not stop its supervisor."""

from __future__ import annotations

import contextlib
import socket
from time import monotonic

#: Bytes beyond which a process that does not read gets no more lines.
MAX_UNSENT_BYTES = 1024 * 1024
#: Seconds without progress, after which it gets no more lines, either.
STALL_SECONDS = 0.5


class SendBuffer:
    """The lines that a link has not taken yet.

    A line is sent whole, or the process dies first.
    """

    def __init__(self) -> None:
        self._unsent = b""
        self._moved_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def accepts(self) -> bool:
        """Return whether the process reads, as far as is known."""
        moves = monotonic() - self._moved_at < STALL_SECONDS
        return not self._unsent or (moves and len(self._unsent) < MAX_UNSENT_BYTES)

    def add(self, line: bytes) -> None:
        """Add a line, to be sent after the earlier ones."""
        if not self._unsent:
            self._moved_at = monotonic()
        self._unsent += line

    def send(self, link: socket.socket) -> None:
        """Send as much as `link` takes without waiting, and nothing more to a dead process."""
        while self._unsent:
            try:
                sent = link.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # others notice its death, and pass on its requests
                self._unsent = b""
                return
            self._unsent = self._unsent[sent:]
            self._moved_at = monotonic()

    def finish(self, link: socket.socket) -> None:
        """Close the sending side once every request is sent, so that the process reads the end."""
        if not self._unsent:
            with contextlib.suppress(OSError):  # it has just died
                link.shutdown(socket.SHUT_WR)
