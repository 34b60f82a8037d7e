"""One run of the benchmarks at a time: they share one database on a server."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Wait for the other processes of this test run."""
    lock = tmp_path_factory.getbasetemp().parent / "benchmarks.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
