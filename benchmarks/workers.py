"""Starts `manage.py mq_worker` as users do, and reads the records of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from django.db import connection

from benchmarks.database import Database, Wrong, check
from benchmarks.footprints import Cost, backend_seconds, share

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Seen:
    """The records of one worker's processes; times are of the machine's monotonic clock.

    `ids` are in the order of each process, one after another.
    `steps` are (calls, time, bytes in RAM), `statements` (time, thread, text); `cpu_seconds` those
    of all threads from begin to end, the supervisor's not among them; `figures_seconds` those in
    which figures were written.
    """

    begin: float
    end: float
    cpu_seconds: float
    ids: array[int]
    processes: int
    starts: dict[int, float]
    finished: list[float]
    steps: list[tuple[int, float, int]]
    statements: list[tuple[float, str, str]]
    peak_bytes: int
    figures_seconds: float

    @property
    def seconds(self) -> float:
        """From before the first claim to after the last commit."""
        return self.end - self.begin


class Worker:
    """One `mq_worker` on `database`, in a `with` block, with default settings save `settings`.

    Its `processes` begin together, each with memory for what it sees of `expected` messages; time
    and memory are noted at each `every` calls; with `statements`, every statement is. `recording`
    holds more options of `recording.begin()`.
    """

    def __init__(
        self,
        database: Database,
        *options: str,
        processes: int = 1,
        expected: int = 0,
        every: int = 0,
        statements: bool = False,
        recording: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._database = database
        self._command = [sys.executable, "manage.py", "mq_worker", *options]
        if processes > 1:
            self._command += ["--processes", str(processes)]
        self._recording = {
            "expected": expected,
            "every": every,
            "together": processes,
            "statements": statements,
            **(recording or {}),
        }
        self._settings = settings

    def __enter__(self) -> Worker:
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="mq-bench-"))
            self._directory = Path(directory)
            log = stack.enter_context((self._directory / "log").open("wb"))
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
                    "MQ_BENCH_DATABASE": self._database.name,
                    "MQ_BENCH_SETTINGS": json.dumps(self._settings),
                    "MQ_BENCH_RECORDING": json.dumps({**self._recording, "directory": directory}),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its children leave when its pipe closes
                self._process.wait()
        self._stack.close()

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM, and return when all its processes have ended, with whatever code."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def until_alive(self) -> None:
        """Return as soon as a worker process has sent a heartbeat."""
        deadline = monotonic() + 60
        while not self._database.count(table="django_mq_workerheartbeat"):
            check(self._process.poll() is None, f"the worker ended: {self._log()}")
            check(monotonic() < deadline, f"the worker did not start: {self._log()}")
            sleep(0.01)

    def calls(self) -> int:
        """The number of handler calls so far, up to the last `every` calls."""
        return sum(int(path.read_text() or 0) for path in self._directory.glob("*.calls"))

    def until_called(self, count: int) -> None:
        """Return when `count` handlers have been called."""
        deadline = monotonic() + 900
        while self.calls() < count:
            check(self._process.poll() is None, f"the worker ended: {self._log()}")
            check(monotonic() < deadline, f"{self.calls()} of {count} messages were handled")
            sleep(0.05)

    def stop(self) -> Seen:
        """Drain it, and return what it saw."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait(60)

    def wait(self, seconds: float = 900) -> Seen:
        """Wait until it exits by itself; raise Wrong unless it succeeded."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Wrong(f"the worker did not end in {seconds:g} s: {self._log()}") from None
        check(code == 0, f"the worker ended with code {code}: {self._log()}")
        paths = list(self._directory.glob("*.json"))
        found = [json.loads(path.read_text()) for path in paths]
        check(found, f"no process of the worker wrote what it saw: {self._log()}")
        check(all(one["begin"] for one in found), "its processes did not begin together")
        ids = array("q")
        for path in paths:
            ids.frombytes(path.with_suffix(".ids").read_bytes())
        return Seen(
            begin=min(one["begin"] for one in found),
            end=max(one["end"] for one in found),
            cpu_seconds=sum(one["cpu_seconds"] for one in found),
            ids=ids,
            processes=len(found),
            starts={id: at for one in found for id, at in one["starts"]},
            finished=[at for one in found for at in one["finished"]],
            steps=[tuple(step) for one in found for step in one["steps"]],
            statements=[tuple(said) for one in found for said in one["statements"]],
            peak_bytes=max(one["peak_bytes"] for one in found),
            figures_seconds=sum(one["figures_seconds"] for one in found),
        )

    def _log(self) -> str:
        text = (self._directory / "log").read_text(errors="replace")
        return " / ".join(text.splitlines()[-5:])


def drained(
    database: Database,
    count: int,
    *options: str,
    processes: int = 1,
    every: int = 0,
    **settings: Any,
) -> Seen:
    """Have one worker take the `count` messages that are due, and verify that it did.

    Raises Wrong unless each handler ran exactly once, and each message is gone.
    """
    due = database.ids()
    check(len(due) == count, f"{len(due)} messages are due instead of {count}")
    with Worker(
        database,
        "--until-empty",
        *options,
        processes=processes,
        expected=count,
        every=every,
        **settings,
    ) as worker:
        seen = worker.wait()
    verify(database, due, seen.ids)
    check(seen.end, "the last commit was not seen")
    check(seen.processes == processes, f"{seen.processes} processes instead of {processes}")
    return seen


def cost_of(
    database: Database, count: int, *options: str, processes: int = 1, **settings: Any
) -> Cost:
    """As `drained`, of a worker that goes on until then: what a message costs, with its CPU."""
    connection.close()  # its backend is no worker's
    due = database.ids()
    check(len(due) == count, f"{len(due)} messages are due instead of {count}")
    every = max(1, count // 50)
    with Worker(
        database, *options, processes=processes, expected=count, every=every, **settings
    ) as worker:
        worker.until_called(count - processes * every)  # a query would cost the server CPU
        until_empty(database, 60)
        postgres = backend_seconds(database)
        seen = worker.stop()
    verify(database, due, seen.ids)
    check(seen.processes == processes, f"{seen.processes} processes instead of {processes}")
    return Cost(count / seen.seconds, seen.cpu_seconds / count, share(postgres, count))


def verify(database: Database, due: set[int], ids: Sequence[int]) -> None:
    """Raise Wrong unless `ids` are those that were due, each once, and nothing is left."""
    check(set(ids) == due, f"{len(due - set(ids))} messages were not handled")
    check(len(ids) == len(due), f"{len(ids) - len(due)} messages were handled twice")
    check(not database.ids(), "messages were handled but not removed")
    failures = database.count(table="django_mq_failedattempt")
    check(not failures, f"{failures} attempts failed")


def until_empty(database: Database, seconds: float) -> None:
    """Return when no message is left; raise Wrong after `seconds`."""
    deadline = monotonic() + seconds
    while database.execute("select exists (select from django_mq_queuedmessage)") != [(False,)]:
        check(monotonic() < deadline, "messages were not removed")
        sleep(0.1)
