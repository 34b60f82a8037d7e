"""Draining while another session holds a snapshot, so that no dead row can be removed.

The rate of each fifth shows whether it stays flat: without a remedy every claim is slower than
the one before. The doorbell rings all the while, in both, as it does when messages come in as fast
as they go: a worker that looks everywhere at each ring walks over all the dead rows each time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median

from benchmarks.database import Database
from benchmarks.report import Row, compared
from benchmarks.workers import Seen, drained
from benchmarks.workloads import Bench

FIFTHS = 5
#: Seconds between two rings: as often as one producing process rings at most.
RING = 0.02


def run(bench: Bench) -> list[Row]:
    """The worker's rate under a held snapshot against its rate without, and its last fifth
    against its first."""
    count = bench.size(250_000, 20_000)
    held, free = [], []
    for _ in bench.in_turn("snapshot"):
        held.append(fifths(_drain(bench, count, hold=True)))
        free.append(fifths(_drain(bench, count, hold=False)))
    return [
        compared(
            "snapshot",
            [whole(each) for each in held],
            [whole(each) for each in free],
            at_least=0.85,
            note=f"{count:,} messages under a held snapshot; against: without one",
        ),
        compared(
            "snapshot, last fifth",
            [each[-1] for each in held],
            [each[0] for each in held],
            at_least=0.85,
            note=f"against the first; fifths {shown(held)}; without a snapshot {shown(free)}",
            series={"snapshot held": middle(held), "without": middle(free)},
        ),
    ]


def fifths(seen: Seen) -> list[float]:
    """Return the messages a second of each fifth."""
    times = [seen.begin, *(at for _, at, _ in seen.steps)]
    times[-1] = seen.end
    share = len(seen.ids) / FIFTHS
    return [share / (end - begin) for begin, end in pairwise(times)]


def whole(rates: Sequence[float]) -> float:
    """Return the rate of all fifths together.

    >>> round(whole([10.0, 10.0, 5.0, 10.0, 10.0]), 3)
    8.333
    """
    return len(rates) / sum(1 / rate for rate in rates)


def middle(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each fifth."""
    return [median(rates) for rates in zip(*rounds, strict=True)]


def shown(rounds: Sequence[Sequence[float]]) -> str:
    """Return the median of each fifth, as text."""
    return " ".join(f"{rate:,.0f}" for rate in middle(rounds))


def _drain(bench: Bench, count: int, *, hold: bool) -> Seen:
    database = bench.database
    database.clear()
    database.fill(count)
    database.settle()
    with ExitStack() as stack:
        if hold:
            holder = stack.enter_context(database.connect())
            holder.execute("begin isolation level repeatable read")
            holder.execute("select 1 from django_mq_queuedmessage limit 1")  # takes the snapshot
        stack.enter_context(ringing(database))
        return drained(database, count, every=count // FIFTHS)


@contextmanager
def ringing(database: Database) -> Iterator[None]:
    """Ring the doorbell all the while, as producers do."""
    ended = threading.Event()

    def ring() -> None:
        with database.connect() as bell:
            while not ended.wait(RING):
                bell.execute("notify django_mq")

    thread = threading.Thread(target=ring)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
