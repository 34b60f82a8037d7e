"""What a worker process under measurement sees, and writes to a file when it stops.

The clock is CLOCK_MONOTONIC, which all processes of a machine share. A run begins with the signal
`worker_started`: after the process started and connected, before its first claim. It ends after
the COMMIT of the last message, when the on_commit hook of that message runs.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg

from django_mq.signals import worker_started, worker_stopped


class Recorder:
    """Memory for `expected` calls is taken and touched at the start, so that it does not grow."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.end = 0.0
        self.calls = 0
        self.expected = 0
        self.every = 1 << 62
        self.ids = array("q")
        self.starts: list[tuple[int, float]] = []
        self.finished: list[float] = []
        self.steps: list[tuple[int, float, int]] = []
        self.statements: list[tuple[float, str, str]] = []

    def expect(self, messages: int, every: int) -> None:
        """Expect so many messages in this process; note time and memory at each `every` calls."""
        self.expected = messages
        self.every = every or self.every
        self.ids = array("q", bytes(8 * messages))

    def called(self, id: int) -> bool:
        """A handler was called; say whether it was the last that is expected."""
        at = self.calls
        self.calls = at + 1
        if at < self.expected:
            self.ids[at] = id
        else:
            self.ids.append(id)
        if (at + 1) % self.every == 0:
            self.steps.append((at + 1, monotonic(), resident_bytes()))
        return at + 1 == self.expected

    def started(self, id: int, at: float) -> None:
        """A handler started at `at`."""
        self.starts.append((id, at))

    def ended(self) -> None:
        """A handler is about to return."""
        self.finished.append(monotonic())

    def committed(self) -> None:
        """A message's transaction is committed."""
        self.end = monotonic()

    def as_data(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "begin": self.begin,
            "end": self.end,
            "calls": self.calls,
            "ids": self.ids[: self.calls].tolist(),
            "starts": self.starts,
            "finished": self.finished,
            "steps": self.steps,
            "statements": self.statements,
            "peak_bytes": peak_bytes(),
        }


recorder = Recorder()


def begin(*, directory: str, expected: int = 0, every: int = 0, statements: bool = False) -> None:
    """Record in this process and its children; each child writes `<pid>.json` at its end."""

    def start(**_: object) -> None:
        recorder.expect(expected, every)
        recorder.begin = monotonic()

    def stop(**_: object) -> None:
        path = Path(directory, f"{os.getpid()}.json")
        path.with_suffix(".new").write_text(json.dumps(recorder.as_data()))
        path.with_suffix(".new").rename(path)

    worker_started.connect(start, weak=False, dispatch_uid="bench.start")
    worker_stopped.connect(stop, weak=False, dispatch_uid="bench.stop")
    if statements:
        _watch_statements()


def _watch_statements() -> None:
    """Note the time, thread and text of every statement: the server cannot say whose they are."""
    execute = psycopg.Cursor.execute

    def watched(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        text = query if isinstance(query, str) else repr(query)
        at = (monotonic(), threading.current_thread().name, " ".join(text.split())[:200])
        recorder.statements.append(at)
        return execute(self, query, *args, **kwargs)

    psycopg.Cursor.execute = watched  # type: ignore[method-assign]


def resident_bytes() -> int:
    """The memory of this process that is in RAM; 0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most that `resident_bytes` ever was. (getrusage would count the parent's, too.)"""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
