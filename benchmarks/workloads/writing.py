"""A handler that writes one row, against a bare loop that writes the same rows.

The handler has a plain cursor of Django's connection, and the savepoint that every handler has
which touches its connection. The loop takes a hundred messages, writes a row for each in a
savepoint (three statements), and commits.
"""

from __future__ import annotations

from benchmarks import bare
from benchmarks.database import Database, check
from benchmarks.report import Row, compared
from benchmarks.workers import drained, verify
from benchmarks.workloads import Bench


def run(bench: Bench) -> list[Row]:
    """Both in turn; each message has its one row."""
    count = bench.size(20_000, 1_000)
    ours, loop = [], []
    for _ in bench.in_turn("writing"):
        ours.append(worker_rate(bench.database, count))
        loop.append(bare_rate(bench.database, count))
    note = f"{count:,} handlers that insert one row; against: the bare loop, savepoints and inserts"
    return [compared("writing", ours, loop, at_least=0.7, note=note)]


def worker_rate(database: Database, count: int) -> float:
    """Return messages a second of one worker process."""
    due = _prepare(database, count)
    seen = drained(database, count)
    _verify_rows(database, due)
    return count / seen.seconds


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
