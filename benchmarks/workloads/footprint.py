"""The costs of a thousand messages: CPU of Python, CPU of PostgreSQL, bytes of WAL.

Of a plain drain by one worker process, against the bare loop on the same table. CPU of Python is
that of the process that runs handlers, with all its threads, from before the first claim to after
the last commit. CPU of PostgreSQL is that of the backends of the worker's connections, which is
read from /proc while they are idle after the last message: where the server is another machine it
is left out. WAL is what the whole server wrote. There is no checkpoint between filling and
draining, which would add whole pages to it. Once more with half of each page left free: there
the claim's new version of a row lies beside the old one, and most of it is not written again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

from benchmarks import bare
from benchmarks.database import Database
from benchmarks.footprints import backend_seconds
from benchmarks.report import Row, compared
from benchmarks.workers import Worker, until_empty, verify
from benchmarks.workloads import Bench


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of a whole drain; `postgres` is None where it cannot be seen."""

    python: float
    postgres: float | None
    wal: int


def run(bench: Bench) -> list[Row]:
    """Worker and bare loop in turn."""
    count = bench.size(100_000, 5_000)
    ours, loop, half = [], [], []
    for _ in bench.in_turn("footprint"):
        ours.append(_worker(bench.database, count))
        loop.append(_bare(bench.database, count))
        half.append(_worker_in_half_full_pages(bench.database, count))

    def row(name: str, unit: str, of: Callable[[Cost], float], note: str) -> Row:
        return compared(
            f"footprint, {name}", list(map(of, ours)), list(map(of, loop)), unit=unit, note=note
        )

    per = 1000 / count  # seconds of all messages are milliseconds of a thousand: 1000 / thousands
    seen = all(cost.postgres is not None for cost in (*ours, *loop))
    told = f"{count:,} no-op messages, one process" + (
        "" if seen else "; that of PostgreSQL cannot be seen from here"
    )
    rows = [row("Python's CPU", "ms / 1,000", lambda cost: cost.python * per * 1000, told)]
    if seen:
        rows.append(
            row(
                "PostgreSQL's CPU", "ms / 1,000", lambda cost: (cost.postgres or 0) * per * 1000, ""
            )
        )
    roomy = compared(
        "footprint, WAL, pages half full",
        [cost.wal / count for cost in half],
        [cost.wal / count for cost in ours],
        unit="bytes / msg",
        note="fillfactor 50; against: as the migration leaves it",
    )
    return [*rows, row("WAL", "bytes / msg", lambda cost: cost.wal / count, ""), roomy]


def _worker(database: Database, count: int) -> Cost:
    due, written = _prepare(database, count)
    with Worker(database, expected=count) as worker:
        until_empty(database, 600)
        wal, postgres = _wal(database) - written, backend_seconds(database)
        seen = worker.stop()
    verify(database, due, seen.ids)
    return Cost(seen.cpu_seconds, postgres, wal)


def _worker_in_half_full_pages(database: Database, count: int) -> Cost:
    database.execute("alter table django_mq_queuedmessage set (fillfactor = 50)")
    try:
        return _worker(database, count)
    finally:
        database.execute("alter table django_mq_queuedmessage reset (fillfactor)")


def _bare(database: Database, count: int) -> Cost:
    due, written = _prepare(database, count)
    with database.connect(autocommit=False) as connection:
        began = process_time()
        done = bare.drain_on(connection)
        python = process_time() - began
        wal, postgres = _wal(database) - written, backend_seconds(database)
    verify(database, due, done.ids)
    return Cost(python, postgres, wal)


def _prepare(database: Database, count: int) -> tuple[set[int], int]:
    database.clear()
    database.checkpoint()
    database.fill(count)
    database.vacuum()
    return database.ids(), _wal(database)


def _wal(database: Database) -> int:
    """Return how many bytes the server ever wrote."""
    return int(database.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])
