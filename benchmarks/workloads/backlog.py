"""Draining beside a million delayed and a million dead rows of the same queue.

They stay in a database of their own, a copy of the empty one, so that rounds with and without
them take turns. The delayed rows are of the priority of the messages and of two higher ones.
"""

from __future__ import annotations

from benchmarks.database import Database, copied
from benchmarks.report import Row, compared
from benchmarks.workers import drained
from benchmarks.workloads import Bench

DAY = 86_400.0


def run(bench: Bench) -> list[Row]:
    """The worker's rate with the rows, against its rate without."""
    count, beside = bench.size(50_000, 5_000), bench.size(1_000_000, 60_000)
    bench.database.clear()
    with_rows, without = [], []
    with copied(bench.database, "backlog") as crowded:
        share = beside // 3
        for priority, rows in ((0, beside - 2 * share), (5, share), (9, share)):
            crowded.fill(rows, priority=priority, after=DAY)
        crowded.fill(beside, dead=True)
        for _ in bench.in_turn("backlog"):
            with_rows.append(_rate(crowded, count))
            without.append(_rate(bench.database, count))
    return [
        compared(
            "backlog",
            with_rows,
            without,
            at_least=0.95,
            note=f"beside {beside:,} delayed and {beside:,} dead rows; against: without them",
        )
    ]


def _rate(database: Database, count: int) -> float:
    database.fill(count)
    database.settle()
    return count / drained(database, count).seconds
