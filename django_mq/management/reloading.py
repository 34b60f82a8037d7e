"""`mq_worker --reload`: start again when code changes, even after code that does not load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

from django.utils.autoreload import (
    DJANGO_AUTORELOAD_ENV,
    StatReloader,
    get_child_arguments,
    get_reloader,
    start_django,
)

from django_mq.supervisor.stop_signals import STOP_SIGNALS, is_ignored_hangup

#: Exit code of Django's reloader when code changed.
RELOAD_EXIT_CODE = 3
#: Seconds between two looks at the files.
INTERVAL = 0.5

Files = dict[Path, float]


def is_reloaded() -> bool:
    """Return whether this is the process that the reloader starts again and again."""
    return os.environ.get(DJANGO_AUTORELOAD_ENV) == "true"


def run_reloading(run: Callable[..., None], *args: Any) -> None:
    """Call `run` in a child process that is replaced when code changes; never returns.

    Django's own reloader ends with a child that could not load the project, and ends a child that
    drains. This one leaves the traceback on the screen and waits for the next change.
    """
    if is_reloaded():
        _handle_stop_signals(_leave)
        start_django(get_reloader(), run, *args)
        return
    reloader = _Reloader()
    _handle_stop_signals(reloader.stop)
    sys.exit(reloader.run())


def _handle_stop_signals(handle: Callable[[int, object], None]) -> None:
    for number in STOP_SIGNALS:
        if not is_ignored_hangup(number):
            signal.signal(number, handle)


def _leave(number: int, frame: object) -> None:
    """Begin to end this process; after that, only Ctrl-C cuts its drain short."""
    _handle_stop_signals(_ignore)  # the others come from the parent, after a Ctrl-C for both
    # By the kernel: the main thread waits for the drain, and another one may receive the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(0)


def _ignore(number: int, frame: object) -> None:
    """Do nothing; with SIG_IGN, Python would complain about a signal that came just before."""


class _Reloader:
    """Starts children until one ends well, or a signal comes: the first one drains the child."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Return the exit code of the last child."""
        environment = {**os.environ, DJANGO_AUTORELOAD_ENV: "true"}
        while True:
            # Taken before the child reads the files, so that no change made while it fails is
            # missed.
            before = _files()
            self._child = subprocess.Popen(get_child_arguments(), env=environment, close_fds=False)
            code = self._child.wait()
            self._child = None
            if self._stopping or code <= 0:
                return code
            if code == RELOAD_EXIT_CODE:
                continue
            sys.stderr.write("The worker could not start; it waits for a change of the code.\n")
            sys.stderr.flush()
            while _files() == before:
                sleep(INTERVAL)

    def stop(self, number: int, frame: object) -> None:
        """Pass the signal on; the child may have received it already, as with Ctrl-C."""
        if self._child is None:
            sys.exit(0)
        if not self._stopping:
            self._child.terminate()
        elif number != signal.SIGHUP:  # a closing terminal sends it twice
            self._child.kill()
        self._stopping = True


def _files() -> Files:
    """Return the files of loaded modules and, beside them, the project's modules not yet loaded."""
    found = dict(StatReloader().snapshot_files())
    for folder in {path.parent for path in found if _is_own(path)}:
        for path in folder.glob("*.py"):
            try:
                found[path] = path.stat().st_mtime
            except OSError:  # removed in the meantime
                continue
    return found


def _is_own(path: Path) -> bool:
    installed = (Path(sys.prefix), Path(sys.base_prefix))
    return "site-packages" not in path.parts and not any(map(path.is_relative_to, installed))
