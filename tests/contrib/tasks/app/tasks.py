"""Tasks that report through files, so that other processes see it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from django_mq.contrib.tasks import task


@task
def note(directory: str, name: str) -> int:
    """Count the run in a file."""
    with (Path(directory) / name).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return os.getpid()


@task(takes_context=True, atomic=False)
def hold(context: Any, directory: str) -> int:
    """Report this process, and wait until the file `open` exists."""
    (Path(directory) / f"attempt-{context.attempt}").write_text(str(os.getpid()))
    while not (Path(directory) / "open").exists():
        time.sleep(0.01)
    return int(context.attempt)
