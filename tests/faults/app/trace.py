"""A trace of handlers, written outside all transactions: it survives every rollback.

Each event is one line of a file, appended by one write, so the lines of several processes do not
mix and their order is that of the events. Events are `start`, `return` and `raise`; a start
without an end is a process that died.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The environment variables: the directory, and whether this worker stops at the gate.
DIRECTORY, GATED = "FAULTS_DIR", "FAULTS_GATED"


def _path(name: str) -> Path:
    return Path(os.environ[DIRECTORY]) / name


def _write(event: str, delivery: Any) -> None:
    line = f"{event}\t{delivery.payload['name']}\t{delivery.attempt}\t{os.getpid()}\n"
    file = os.open(_path("trace"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)


@contextmanager
def traced(*deliveries: Any) -> Iterator[Callable[[Any], None]]:
    """Trace the start and the end of the handler inside.

    The block gets a function that traces the end of a message whose verdict is that it failed:
    should the process die after that, the message runs again on the same attempt.
    """
    for delivery in deliveries:
        _write("start", delivery)
    running = list(deliveries)

    def ended(delivery: Any) -> None:
        running.remove(delivery)
        _write("raise", delivery)

    event = "raise"
    try:
        yield ended
        event = "return"
    finally:
        for delivery in running:
            _write(event, delivery)


def pass_gate() -> None:
    """Wait while the gate is shut, in a worker that stops there."""
    if not os.environ.get(GATED):
        return
    _path("waiting").touch()
    with _path("gate").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def shut_gate(directory: Path) -> Iterator[None]:
    """Shut the gate of `directory` until the end of the block."""
    with (directory / "gate").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_anybody_waiting(directory: Path) -> bool:
    """Say whether a handler has reached the gate."""
    return (directory / "waiting").exists()


def clear(directory: Path) -> None:
    for name in ("trace", "waiting"):
        (directory / name).unlink(missing_ok=True)


def events(directory: Path) -> list[tuple[str, str, int, int]]:
    """Return event, name, attempt and pid of all events, in order."""
    try:
        lines = (directory / "trace").read_text().splitlines()
    except FileNotFoundError:
        return []
    fields = [line.split("\t") for line in lines]
    return [(event, name, int(attempt), int(pid)) for event, name, attempt, pid in fields]
