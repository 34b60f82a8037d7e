"""A handler that writes one row, against a bare loop that writes the same rows.

The handler has a plain cursor of Django's connection, and the savepoint that every handler has
which touches its connection. The loop takes a hundred messages, writes a row for each in a
savepoint (three statements), and commits.
"""

from __future__ import annotations

from benchmarks import bare
from benchmarks.database import Database, check
from benchmarks.footprints import Cost, costs_compared
from benchmarks.report import Row
from benchmarks.workers import cost_of, verify
from benchmarks.workloads import Bench


def run(bench: Bench) -> list[Row]:
    """Both in turn; each message has its one row."""
    count = bench.size(20_000, 1_000)
    ours: list[Cost] = []
    loop: list[Cost] = []
    for _ in bench.in_turn("writing"):
        ours.append(worker_cost(bench.database, count))
        loop.append(Cost(bare_rate(bench.database, count)))
    note = f"{count:,} handlers that insert one row; against: the bare loop, savepoints and inserts"
    return [costs_compared("writing", ours, loop, at_least=0.7, note=note)]


def worker_cost(database: Database, count: int) -> Cost:
    """Return what a message costs one worker process."""
    due = _prepare(database, count)
    cost = cost_of(database, count)
    _verify_rows(database, due)
    return cost


def bare_rate(database: Database, count: int) -> float:
    """Return messages a second of the bare loop."""
    due = _prepare(database, count)
    done = bare.write(database.params())
    verify(database, due, done.ids)
    _verify_rows(database, due)
    return count / (done.end - done.begin)


def _prepare(database: Database, count: int) -> set[int]:
    database.clear()
    database.fill(count, "bench.write")
    database.settle()
    return database.ids()


def _verify_rows(database: Database, due: set[int]) -> None:
    written = [id for (id,) in database.execute("select message from bench_entry")]
    check(set(written) == due, "messages have no row of theirs")
    check(len(written) == len(due), "messages have two rows")
