"""A worker that has handled thousands of messages holds no more than after the first hundreds.

`LEAKS_MESSAGES` is the number of messages, by default 2,000.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from django.db import connection

from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.waiting import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks in /proc")

MESSAGES = int(os.environ.get("LEAKS_MESSAGES", "2000"))
#: The number of rounds in which messages are sent; the first rounds are the warm-up.
ROUNDS, WARM = 8, 2
KINDS = ("write", "tally", "call", "acall", "abrief", "list", "line", "fail", "chain")
#: Allowance for resources opened on first use. A leak per message, or per batch, would exceed it.
SPARE = 4
#: Megabytes that a warm process may grow by, which are its allocator's.
GROWTH = 16.0

SESSIONS = """
select count(*) from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend'
"""


class Held(NamedTuple):
    """The resources that the processes of a worker hold, the supervisor first."""

    descriptors: tuple[int, ...]
    threads: tuple[int, ...]
    megabytes: tuple[float, ...]
    sessions: int

    def is_within(self, warm: Held) -> bool:
        """Say whether these are within the allowance of those held when `warm`."""
        return (
            all(
                now <= then + SPARE
                for these, those in zip(self[:2], warm[:2], strict=True)
                for now, then in zip(these, those, strict=True)
            )
            and all(
                now < then + GROWTH
                for now, then in zip(self.megabytes, warm.megabytes, strict=True)
            )
            and self.sessions <= warm.sessions + SPARE
        )


def held(worker: Worker) -> Held:
    processes = [Path(f"/proc/{pid}") for pid in (worker.pid, *worker.children())]
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS)
        [sessions] = cursor.fetchone()
    return Held(
        tuple(len(list((each / "fd").iterdir())) for each in processes),
        tuple(len(list((each / "task").iterdir())) for each in processes),
        tuple(_resident(each / "status") for each in processes),
        sessions,
    )


def _resident(status: Path) -> float:
    [kilobytes] = re.findall(r"VmRSS:\s*(\d+)", status.read_text())
    return int(kilobytes) / 1024


@pytest.mark.thorough
def test_nothing_is_left_of_thousands_of_messages(
    start: Callable[..., Worker], queue: Queue, witness: Witness
) -> None:
    """Descriptors, threads, memory and sessions, with handlers of every kind, some failing."""
    witness.open("open")
    worker = start("--processes", 1, "--threads", 2)
    worker.has_started(1)
    each = MESSAGES // ROUNDS // len(KINDS)
    for number in range(ROUNDS):
        for kind in KINDS:
            names = [f"{kind}-{number}-{n}" for n in range(each)]
            queue.send(kind, *names, gate="open", until=2, line=kind)
        queue.wait_empty(worker, 600)
        if number + 1 == WARM:
            warm = held(worker)
    # Momentary resources, such as a connection of a chore, are closed soon.
    now = held(worker)
    until(lambda: held(worker).is_within(warm), f"no more than {warm}: now {now}")
    # All but `abrief` have an effect, and `chain` has two.
    assert queue.done().total() == ROUNDS * each * len(KINDS)
    assert set(queue.done().values()) == {1}
    assert len(worker.children()) == 1
