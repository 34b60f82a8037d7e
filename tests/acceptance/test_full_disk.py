"""Guarantees 1, 16: the server's disk fills up; nothing is lost, and work resumes by itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from testproject.embedded.server import Server
from tests.acceptance.app.witness import Witness
from tests.acceptance.private import directory, done, look, running, send, url_of
from tests.acceptance.processes import Worker

#: Size in megabytes of the disk that fills up.
SIZE = 24


@contextmanager
def disk(path: Path) -> Iterator[Path]:
    """A small separate disk at `path`; skips the test if mounting is not allowed."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk to fill it")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={SIZE}m,mode=755", "tmpfs", str(path)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small() -> Iterator[tuple[Server, Path]]:
    """A server whose tables are on a separate small disk."""
    with directory() as path, disk(path), running() as server:
        server.account.give(path)
        look(server, f"create tablespace small location '{path}'", rows=False)
        for what in ("table", "index"):
            look(
                server,
                f"alter {what} all in tablespace pg_default set tablespace small",
                rows=False,
            )
        yield server, path


def fill(path: Path) -> Path:
    """Fill the rest of the disk; return the file that fills it."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return ballast


def send_until_full(server: Server, stored: list[str]) -> None:
    for number in range(10_000):
        send(server, "write", f"late{number}", ballast="x" * 4000)
        stored.append(f"late{number}")


@pytest.mark.slow
def test_a_disk_that_is_full(
    start: Callable[..., Worker], small: tuple[Server, Path], witness: Witness
) -> None:
    """A producer's transaction fails with an error; the worker logs the cause, and waits."""
    server, path = small
    send(server, "write", "before")
    worker = start("--threads", 2, url=url_of(server))
    worker.until(lambda: done(server) == ["before"], "it works")
    names = [f"m{n:03}".ljust(1000, "-") for n in range(300)]  # as large as their effects
    send(server, "gate", *names, gate="full")
    worker.until(lambda: witness.started(names[0]), "one is in its transaction")

    ballast = fill(path)
    stored: list[str] = []
    with pytest.raises(psycopg.errors.DiskFull):
        send_until_full(server, stored)
    witness.open("full")
    worker.until(lambda: worker.said().count("No space left on device") > 2, "it says why")

    ballast.unlink()
    send(server, "write", "after")
    wanted = sorted(["before", "after", *names, *stored])
    worker.until(
        lambda: look(server, "select count(*) from django_mq_queuedmessage") == [(0,)], "all end"
    )
    assert done(server) == wanted
    assert len(worker.children()) == 1
    worker.tell(signal.SIGTERM)
    assert worker.ends() == 0
