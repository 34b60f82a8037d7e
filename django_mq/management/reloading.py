"""`mq_worker --reload`: start again when code changes, also after code that does not load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

from django.utils.autoreload import (
    DJANGO_AUTORELOAD_ENV,
    StatReloader,
    get_child_arguments,
    run_with_reloader,
)

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

    Django's own reloader ends with a child that could not load the project. This one leaves the
    traceback on the screen and waits for the next change.
    """
    if is_reloaded():
        run_with_reloader(run, *args)
        return
    signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))
    with suppress(KeyboardInterrupt):
        sys.exit(_supervise())


def _supervise() -> int:
    """Start children until one ends well or by a signal; return its exit code."""
    environment = {**os.environ, DJANGO_AUTORELOAD_ENV: "true"}
    while True:
        # Before the child reads them: what changes while it fails is not missed.
        before = _files()
        code = subprocess.run(
            get_child_arguments(), env=environment, close_fds=False, check=False
        ).returncode
        if code == RELOAD_EXIT_CODE:
            continue
        if code <= 0:
            return code
        sys.stderr.write("The worker could not start; it waits for a change of the code.\n")
        sys.stderr.flush()
        while _files() == before:
            sleep(INTERVAL)


def _files() -> Files:
    """Return the files of loaded modules and, beside them, the project's modules not yet loaded."""
    found = dict(StatReloader().snapshot_files())
    for folder in {path.parent for path in found if _is_own(path)}:
        for path in folder.glob("*.py"):
            try:
                found[path] = path.stat().st_mtime
            except OSError:  # removed meanwhile
                continue
    return found


def _is_own(path: Path) -> bool:
    installed = (Path(sys.prefix), Path(sys.base_prefix))
    return "site-packages" not in path.parts and not any(map(path.is_relative_to, installed))
