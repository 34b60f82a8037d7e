"""Traces and gates of handlers, both outside any transaction.

A line in a file says that a handler started: it is there before anything commits, and stays when
everything is rolled back. A handler waits at a gate until a file of that name exists.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Seconds; no handler waits longer, so a test that forgets to open its gate fails, not hangs.
PATIENCE = 60.0


class Witness:
    """The directory of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def saw(self, name: str, attempt: int) -> None:
        """Record that this process starts attempt `attempt` of the message called `name`."""
        line = f"{name} {attempt} {os.getpid()}\n"
        log = os.open(self.directory / "started", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, line.encode())  # one write: lines of several processes do not mix
        os.close(log)

    def started(self, name: str | None = None) -> list[tuple[str, int, int]]:
        """Return name, attempt and pid of all started attempts, in order."""
        try:
            lines = (self.directory / "started").read_text().splitlines()
        except FileNotFoundError:
            return []
        starts = [(n, int(attempt), int(pid)) for n, attempt, pid in map(str.split, lines)]
        return [start for start in starts if name in (None, start[0])]

    def open(self, gate: str) -> None:
        """Open `gate` for all handlers."""
        (self.directory / f"{gate}.gate").touch()

    def is_open(self, gate: str) -> bool:
        return (self.directory / f"{gate}.gate").exists()

    def wait_at(self, gate: str) -> None:
        """Wait until `gate` is open; raises TimeoutError in the end."""
        deadline = time.monotonic() + PATIENCE
        while not self.is_open(gate):
            if time.monotonic() > deadline:
                raise TimeoutError(gate)
            time.sleep(0.02)
