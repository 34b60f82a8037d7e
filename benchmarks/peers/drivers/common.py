"""Shared code of the Python drivers: reading commands, and reporting results.

`driver.py COMMAND ARGUMENTS`, with ARGUMENTS as JSON, writes one line of JSON. Only `work` is a
conversation: "ready" when it is connected; then it waits for a line; it tells how many jobs are
done, again and again, until the next line, which ends it; last comes what it saw.

The database is that of libpq's environment variables. Standard library only: each driver runs in
the environment of its peer. The clock is the one that all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from time import monotonic, process_time, sleep
from typing import Any

#: Seconds between two reports of a working driver.
REPORT = 0.05


def say(**data: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


def main(commands: dict[str, Callable[..., Any]]) -> None:
    """Run the command of the command line."""
    arguments = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    say(**(commands[sys.argv[1]](**arguments) or {}))


def timed(count: int, warm_up: int, enqueue: Callable[[], tuple[Any, Any]]) -> dict[str, Any]:
    """Call `enqueue` so often; it returns the ids of its business row and of its job."""
    pairs = [enqueue() for _ in range(warm_up)]
    began, cpu = monotonic(), process_time()
    pairs += [enqueue() for _ in range(count)]
    return {"seconds": monotonic() - began, "cpu": process_time() - cpu, "pairs": pairs}


def paced(count: int, every: float, enqueue: Callable[[], tuple[Any, Any]]) -> dict[str, Any]:
    """Call `enqueue` each so many seconds; note when each returned, which is after its COMMIT."""
    commits = []
    at = monotonic()
    for _ in range(count):
        at += every
        sleep(max(0.0, at - monotonic()))
        _, id = enqueue()
        commits.append((str(id), monotonic()))
    return {"commits": commits}


class Work:
    """The work of one process."""

    def __init__(self) -> None:
        self.begin: float | None = None
        self.end = 0.0
        self.cpu_begin = self.cpu_end = 0.0
        self.done = 0
        self.ids: list[Any] = []
        self.starts: list[float] = []

    def handled(self, id: Any) -> None:
        """A handler was called with this job."""
        self.starts.append(monotonic())
        self.ids.append(id)

    def claiming(self) -> None:
        """Call this before each claim; the first call starts the clock."""
        if self.begin is None:
            self.cpu_begin = process_time()
            self.begin = monotonic()

    def settled(self, count: int = 1) -> None:
        """Call this when `count` jobs are removed or marked as done, after the commit."""
        self.end, self.cpu_end = monotonic(), process_time()
        self.done += count

    def wait(self, stop: Callable[[], Any]) -> None:
        """Say "ready" and wait for the start; from then on report, and call `stop` when told."""
        say(ready=True)
        sys.stdin.readline()
        threading.Thread(target=self._report, daemon=True).start()
        threading.Thread(target=self._listen, args=(stop,), daemon=True).start()

    def seen(self) -> dict[str, Any]:
        """Return everything."""
        cpu = self.cpu_end - self.cpu_begin
        ids = [str(id) for id in self.ids]
        seen = {"begin": self.begin, "end": self.end, "ids": ids, "starts": self.starts}
        return {**seen, "cpu": cpu}

    def _report(self) -> None:
        told = 0
        while True:
            sleep(REPORT)
            if self.done != told:
                told = self.done
                say(done=told)

    def _listen(self, stop: Callable[[], Any]) -> None:
        sys.stdin.readline()
        stop()
