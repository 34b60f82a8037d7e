"""One module a workload: `run(bench)` measures, verifies, and returns rows of the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.database import Database

#: In the order in which they run: those that disturb the others least come first.
NAMES = (
    "real",
    "drain",
    "lines",
    "writing",
    "broadcast",
    "bulk",
    "latency",
    "lapsed",
    "idle",
    "contention",
    "producers",
    "footprint",
    "memory",
    "snapshot",
    "backlog",
    "sustained",
    "breadth",
    "growth",
    "peers",
    "beside",
    "tasks",
    "recovery",
)


@dataclass(frozen=True)
class Bench:
    """The place and size of a measurement; each round runs ours and the bare loop in turn."""

    database: Database
    rounds: int
    quick: bool = False

    def size(self, full: int, quick: int) -> int:
        """Return how many messages to use."""
        return quick if self.quick else full

    def in_turn(self, what: str) -> Iterator[int]:
        """Yield the numbers of the rounds, and say on stderr how far it is."""
        for number in range(1, self.rounds + 1):
            sys.stderr.write(f"{what}: round {number} of {self.rounds}\n")
            yield number
