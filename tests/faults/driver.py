"""Worker trees: `manage.py mq_worker`, forked from a process that has imported Django already.

A tree is a supervisor and its children in their own session and process group. The nursery that
forks them has one thread and no connection, so nothing is inherited by accident.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds for anything that must happen at all, on a loaded machine.
AT_ALL = 60.0
#: The exit code of a tree in which the command could not run at all.
NO_WORKER = 70
# Numbers of prctl(2), which only Linux has.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def until(look: Callable[[], Any], what: str, seconds: float = AT_ALL) -> Any:
    """Return the result of `look` once it is true; TimeoutError if it never is."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.004)
    return seen


class Nursery:
    """Forks worker trees on request. Create it before the first thread and the first connection."""

    def __init__(self, run: Callable[[dict[str, Any]], int]) -> None:
        """In the new tree, `run` gets the arguments of `start()`; it returns the exit code."""
        gc.collect()
        gc.freeze()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._run = run
        self.pid = os.fork()
        if not self.pid:
            self._link.close()
            self._serve(theirs)
        theirs.close()

    def start(self, options: dict[str, Any]) -> Tree:
        """Start a tree; `options["log"]` is the file for its output."""
        return Tree(self._ask("start", options), self, Path(options["log"]))

    def code(self, pid: int) -> int | None:
        """Return the exit code of the supervisor `pid`, -N for signal N; None while it runs."""
        code: int | None = self._ask("code", pid)
        return code

    def close(self) -> None:
        self._link.close()
        os.waitpid(self.pid, 0)

    def _ask(self, *question: Any) -> Any:
        self._link.send(json.dumps(question).encode())
        return json.loads(self._link.recv(65536))

    # ---- in the nursery

    def _serve(self, link: socket.socket) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _prctl(_SET_CHILD_SUBREAPER, 1)  # adopt the orphans of a killed supervisor
        codes: dict[int, int | None] = {}  # by tree: None until its supervisor is waited for
        while question := link.recv(65536):
            what, argument = json.loads(question)
            answer = None
            if what == "start":
                answer = self._fork(argument, link)
                codes[answer] = None
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] in codes:
                        codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
            link.send(json.dumps(codes.get(argument) if what == "code" else answer).encode())
        for pid, code in codes.items():
            if code is None:  # no other process would end it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        os._exit(0)

    def _fork(self, options: dict[str, Any], link: socket.socket) -> int:
        if pid := os.fork():
            return pid
        code = NO_WORKER
        try:
            link.close()
            os.setsid()
            _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # no other process would end it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(options["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            for number in (1, 2):
                os.dup2(log, number)
            code = self._run(options)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Tree:
    """A running worker: the supervisor, whose pid is the group's, and its children."""

    def __init__(self, pid: int, nursery: Nursery, log: Path) -> None:
        self.pid = pid
        self.log = log
        self._nursery = nursery

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def code(self) -> int | None:
        """The exit code of the supervisor; None while it runs."""
        return self._nursery.code(self.pid)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the tree, like the end of its host."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def tell(self, number: int) -> None:
        """Send a signal to the supervisor alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal_all(signal.SIGKILL)

    def kill_child(self) -> None:
        """Kill the children and spare the supervisor; kill it too while it has none."""
        for pid in children_of(self.pid) or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Say whether all its processes have ended."""
        if self.code() is None:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def destroy(self) -> None:
        """End it, frozen or not, and wait until all its processes have ended."""
        if not self.is_gone():
            self.kill()
        until(self.is_gone, "the end of a killed worker")


def children_of(pid: int) -> list[int]:
    """Return the children of process `pid`."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        command = ["pgrep", "-P", str(pid)]
        return [int(each) for each in subprocess.run(command, capture_output=True).stdout.split()]
