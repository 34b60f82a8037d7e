"""A worker that a test started: its output, its processes and its exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.nursery import BASE_DIR, nursery
from tests.waiting import SOON, Seen, until


class Worker:
    """`manage.py mq_worker`, in its own session, so that no process of it can be left."""

    def __init__(
        self, options: Sequence[str], environment: dict[str, str], log: Path, *, anew: bool = False
    ) -> None:
        """Start it: as a fork of the nursery, or `anew` in a new interpreter."""
        self.log = log
        log.touch()
        self.process = (
            _started_anew(options, environment, log)
            if anew
            else nursery().start(["mq_worker", *options], environment, log)
        )

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return self.process.pid

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """The child processes started so far, in order."""
        return [int(pid) for pid in re.findall(r"started: .*process (\d+)", self.said())]

    def has_started(self, count: int) -> list[int]:
        """Wait until `count` children have logged their start; return them."""
        self.until(lambda: len(self.children()) >= count, f"{count} children")
        return self.children()

    def until(self, look: Callable[[], Seen], what: str, seconds: float = SOON) -> Seen:
        """Wait until `look` returns something true; shows the worker's output otherwise."""

        def look_and_see_whether_it_lives() -> Seen:
            gone = not self.is_there()
            seen = look()
            assert seen or not gone, f"it is gone, and there was not: {what}"
            return seen

        try:
            return until(look_and_see_whether_it_lives, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def is_there(self) -> bool:
        """Say whether any of its processes still runs."""
        return self.process.poll() is None or bool(self.remaining())

    def says(self, pattern: str, seconds: float = SOON) -> str:
        """Wait until a line matches `pattern`; return the match."""
        found = self.until(lambda: re.search(pattern, self.said()), f"/{pattern}/ said", seconds)
        return found[0]

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor alone."""
        os.kill(self.pid, number)

    def kill_child(self, number: int, how: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the child that started as number `number`; return its pid."""
        pid = self.has_started(number + 1)[number]
        os.kill(pid, how)
        return pid

    def tell_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of the worker, as the end of its host would."""
        os.killpg(self.pid, number)

    def ends(self, seconds: float = SOON) -> int:
        """Wait for its end and return the exit code: -N for signal N."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds:g} s:\n{self.said()}") from None

    def alive(self) -> list[int]:
        """The running children."""
        return [pid for pid in self.children() if is_running(pid)]

    def remaining(self) -> list[int]:
        """The running processes of its session, including orphans."""
        return [pid for pid in {self.pid, *self.children()} if is_running(pid)]

    def destroy(self) -> None:
        """End all remaining processes, frozen or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(30)


def _started_anew(
    options: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(BASE_DIR / "manage.py"), "mq_worker", *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def is_running(pid: int) -> bool:
    """Say whether `pid` is a process, but not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return status.stdout.strip()[:1] not in ("", "Z")
