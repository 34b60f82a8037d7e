"""`manage.py` in separate processes, forked from one that has imported Django and the package.

A new interpreter spends 0.8 s of CPU on imports before the command begins; a fork spends 0.1 s,
since the nursery holds no settings and no apps: it loads only modules that need neither. It has one
thread, no connection, and its own session.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

BASE_DIR = Path(__file__).resolve().parents[1]

#: The modules that a worker imports, and others that import those.
MODULES = [
    "cronsim", "environ", "logging.config", "psycopg.types.json", "unittest",
    "django.core.mail", "django.core.management.commands.check", "django.core.paginator",
    "django.db.backends.postgresql.base", "django.db.migrations.executor", "django.db.models",
    "django.template.defaultfilters", "django.template.defaulttags", "django.utils.autoreload",
    "django.utils.translation.reloader", "django.views.debug", "django.views.generic",
    "django_mq.checks", "django_mq.supervisor", "django_mq.worker.run",
]  # fmt: skip


class Process:
    """A forked process, which leads a session. Has the parts of Popen that tests use."""

    def __init__(self, nursery: Nursery, command: Sequence[str], pid: int) -> None:
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return the exit code, -N for signal N, and None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask("code", self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit code; subprocess.TimeoutExpired if it still runs."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code


class Nursery:
    """The test's end of the link to the nursery."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                cwd=BASE_DIR,
                env={k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._link = ours.makefile("rw")
        ours.close()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
    ) -> Process:
        """Run `manage.py` with `arguments`; all output goes to `output`, or stderr to `errors`."""
        command = ["manage.py", *arguments]
        paths = [str(output), str(errors or output)]
        pid = self.ask("start", command, dict(environment), paths, os.getcwd())
        return Process(self, command, pid)

    def ask(self, *question: Any) -> Any:
        with self._turn:
            self._link.write(json.dumps(question) + "\n")
            self._link.flush()
            return json.loads(self._link.readline())


@cache
def nursery() -> Nursery:
    """Return the nursery of this process, started on first use."""
    return Nursery()


# ---- in the nursery


def serve(descriptor: int) -> list[str] | None:
    """Fork on request until the link ends. Returns in each forked process with its command line."""
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    codes: dict[int, int | None] = {}
    with link.makefile("rw") as lines:
        for line in lines:
            what, *arguments = json.loads(line)
            if what == "start":
                pid = os.fork()
                if not pid:
                    link.close()
                    return _become(*arguments)
                codes[pid] = None
                answer: int | None = pid
            else:
                answer = codes[arguments[0]] = _code(arguments[0], codes[arguments[0]])
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    for pid, code in codes.items():
        if code is None:  # no other process would end it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return None


def _code(pid: int, known: int | None) -> int | None:
    if known is not None:
        return known
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(
    command: list[str], environment: dict[str, str], paths: list[str], directory: str
) -> list[str]:
    """Make this fork equal to the new process of an interpreter."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in zip((1, 2), paths, strict=True):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    return command


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for module in MODULES:
        importlib.import_module(module)
    # Else each garbage collection in a fork would copy the memory that it shares with this process.
    gc.collect()
    gc.freeze()
    if command := serve(int(sys.argv[1])):
        sys.argv = command
        import manage

        manage.main()


if __name__ == "__main__":
    main()
