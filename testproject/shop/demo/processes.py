"""The web server and the workers: started, watched, and ended whatever happens."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from django.conf import settings

from . import leash

Found = TypeVar("Found")
START_SECONDS = 30


class Trouble(Exception):
    """A process ended, or did not start; the text holds the end of its log."""


class Processes:
    """Programs of `manage.py`, each in a process group of its own. On leaving, none is left.

    A group of its own, so that Ctrl-C reaches the demo alone and everything ends in order,
    and so that what a program started can be ended with it.
    """

    def __init__(self, logs: Path, grace: float = 8) -> None:
        self.logs = logs
        self.grace = grace
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # All are asked at once; one after another would take the sum of their times.
        for process in self.running.values():
            if process.stdin:
                process.stdin.close()
        deadline = time.monotonic() + self.grace
        try:
            for process in self.running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when a second Ctrl-C cuts the waiting short
            for process in self.running.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(self, name: str, *arguments: str) -> None:
        """Start `manage.py` with `arguments`; what it says goes to `<name>.log`."""
        program = [sys.executable, "-u", str(settings.BASE_DIR / "manage.py"), *arguments]
        with self.log(name).open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-S", leash.__file__, *program],
                cwd=settings.BASE_DIR,
                stdin=subprocess.PIPE,  # the leash; closed, it ends the program
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, look: Callable[[], Found | None], what: str) -> Found:
        """Look until there is something to see, and return it. Raises Trouble after 30 s."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := look()):
            self.check()
            if time.monotonic() > deadline:
                raise Trouble(f"{what}: not within {START_SECONDS} s.\n{self.last_words()}")
            time.sleep(0.05)
        return found

    def address(self, name: str) -> str | None:
        """Return where a web server says that it listens, once it does."""
        said = re.search(r"http://[\d.]+:\d+", self.log(name).read_text(errors="replace"))
        return said and said[0]

    def check(self) -> None:
        """Raise Trouble if a process has ended by itself."""
        for name, process in self.running.items():
            if (code := process.poll()) is not None:
                raise Trouble(f"Ended with status {code}: {name}.\n{self.last_words(name)}")

    def last_words(self, *names: str, lines: int = 25) -> str:
        """Return the last lines of the logs."""
        texts = []
        for name in names or self.running:
            words = self.log(name).read_text(errors="replace").splitlines()[-lines:]
            texts.append("\n".join((f"--- {self.log(name)}", *words)))
        return "\n".join(texts)

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
