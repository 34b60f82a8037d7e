"""Records the calls of a worker process under measurement, and writes a file when it stops.

The clock is CLOCK_MONOTONIC, which all processes of a machine share. A run begins with the signal
`worker_started`: after the process started and connected, before its first claim; several
processes begin together. It ends after the COMMIT of the last message, when the worker reports what
it has settled. Nothing is registered in a handler's transaction: a hook would be measured, too.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import Any

import psycopg

from django_mq.executor import reports
from django_mq.signals import worker_started, worker_stopped
from django_mq.store import figures as store

#: More than any count.
NEVER = 1 << 62


class Recorder:
    """Memory for `expected` calls is taken and touched at the start, so that it does not grow.

    One thread of the process runs handlers.
    """

    def __init__(self) -> None:
        self.begin = 0.0
        self.end = 0.0
        self.cpu_begin = 0.0
        self.cpu_end = 0.0
        self.calls = 0
        self.expected = 0
        self.every = NEVER
        self.progress = -1
        self.ids = array("q")
        self.starts: list[tuple[int, float]] = []
        self.finished: list[float] = []
        self.steps: list[tuple[int, float, int]] = []
        self.statements: list[tuple[float, str, str]] = []
        self.figures_seconds = 0.0

    def expect(self, messages: int, every: int, progress: int) -> None:
        """Expect `messages` messages in this process.

        Note time and memory every `every` calls, and write their number to the file `progress`.
        """
        self.expected = messages
        self.every = every or NEVER
        self.progress = progress
        self.ids = array("q", bytes(8 * messages))

    def start(self) -> None:
        """Start the recording, right before the first claim."""
        self.cpu_begin = process_time()
        self.begin = monotonic()

    def called(self, id: int) -> None:
        """A handler was called."""
        at = self.calls
        self.calls = at + 1
        if at < self.expected:
            self.ids[at] = id
        else:
            self.ids.append(id)
        if (at + 1) % self.every == 0:
            self.steps.append((at + 1, monotonic(), resident_bytes()))
            os.pwrite(self.progress, f"{at + 1:20}".encode(), 0)

    def started(self, id: int, at: float) -> None:
        """A handler started at `at`."""
        self.starts.append((id, at))

    def ended(self) -> None:
        """A handler is about to return."""
        self.finished.append(monotonic())

    def committed(self) -> None:
        """Messages are settled."""
        self.end = monotonic()
        self.cpu_end = process_time()

    def as_data(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "begin": self.begin,
            "end": self.end,
            "cpu_seconds": self.cpu_end - self.cpu_begin,
            "starts": self.starts,
            "finished": self.finished,
            "steps": self.steps,
            "statements": self.statements,
            "peak_bytes": peak_bytes(),
            "figures_seconds": self.figures_seconds,
        }


recorder = Recorder()


def begin(
    *,
    directory: str,
    expected: int = 0,
    every: int = 0,
    together: int = 1,
    statements: bool = False,
    figures: bool = True,
) -> None:
    """Record in this process and its children, of which so many begin `together`.

    Each child writes `<pid>.calls` as it goes (at each `every` calls), and `<pid>.ids` (as the
    machine has them in memory) and `<pid>.json` at its end. Without `figures`, those of the
    heartbeat are not written.
    """

    def start(**_: object) -> None:
        path = Path(directory, f"{os.getpid()}.calls")
        progress = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        recorder.expect(expected, every, progress)
        if _all_are_here(Path(directory), together):
            recorder.start()

    def stop(**_: object) -> None:
        path = Path(directory, f"{os.getpid()}.json")
        path.with_suffix(".ids").write_bytes(recorder.ids[: recorder.calls].tobytes())
        path.with_suffix(".new").write_text(json.dumps(recorder.as_data()))
        path.with_suffix(".new").rename(path)

    worker_started.connect(start, weak=False, dispatch_uid="bench.start")
    worker_stopped.connect(stop, weak=False, dispatch_uid="bench.stop")
    if statements:
        _watch_statements()
    reports.all_ended = _noting_commits(reports.all_ended)
    for name in ("write", "write_arrived"):
        setattr(store, name, _timed(getattr(store, name)) if figures else _unwritten)


def _noting_commits(report: Callable[..., None]) -> Callable[..., None]:
    def noting(ended: Any) -> None:
        if ended:  # a chore that settled nothing reports that, too
            recorder.committed()
        report(ended)

    return noting


def _timed(write: Callable[..., None]) -> Callable[..., None]:
    def timed(*args: Any, **kwargs: Any) -> None:
        began = monotonic()
        write(*args, **kwargs)
        recorder.figures_seconds += monotonic() - began

    return timed


def _unwritten(*_: Any, **__: Any) -> None:
    pass


def _all_are_here(directory: Path, count: int) -> bool:
    """Wait for the other processes; nothing would see an error raised from a signal."""
    deadline = monotonic() + 60
    while len(list(directory.glob("*.calls"))) < count:
        if monotonic() > deadline:
            return False
        sleep(0.001)
    return True


def _watch_statements() -> None:
    """Note the time, thread and text of every statement: the server does not know the thread."""
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
