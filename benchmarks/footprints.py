"""The cost of a message: rate and CPU. PostgreSQL's CPU is read from /proc, if it runs here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.database import Database
from benchmarks.report import Row, compared

BACKENDS = """
select pid from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend'
   and pid <> pg_backend_pid()
"""


@dataclass(frozen=True)
class Cost:
    """Jobs a second, and CPU seconds a job: of the client's processes, and of its backends.

    CPU is None where it is not known, or the server is another machine.
    """

    rate: float
    python: float | None = None
    postgres: float | None = None


def with_cpu(row: Row, costs: Sequence[Cost]) -> Row:
    """Return the row with the medians of the CPU, where each of `costs` has it."""
    worker = _microseconds([cost.python for cost in costs])
    server = _microseconds([cost.postgres for cost in costs])
    return replace(row, worker_us=worker, server_us=server)


def costs_compared(
    workload: str,
    ours: Sequence[Cost],
    others: Sequence[Cost],
    *,
    at_least: float | None = None,
    note: str = "",
) -> Row:
    """Return the row of two rates measured in turn, with the CPU of ours."""
    rates = [[cost.rate for cost in costs] for costs in (ours, others)]
    return with_cpu(compared(workload, *rates, at_least=at_least, note=note), ours)


def share(seconds: float | None, count: int) -> float | None:
    """Return the seconds per message of `count`; None if `seconds` is None."""
    return None if seconds is None else float(seconds) / count


def backend_seconds(database: Database) -> float | None:
    """Return the CPU seconds of all backends of this database; None where they are elsewhere."""
    pids = [pid for (pid,) in database.execute(BACKENDS)]
    try:
        return sum(map(_seconds, pids))
    except OSError:
        return None


def _seconds(pid: int) -> float:
    """Return the CPU seconds of one process, user's and system's.

    Raises OSError if there is none, or it is not PostgreSQL's: pids of another machine.
    """
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    if "postgres" not in name:
        raise ProcessLookupError(pid)
    user, system = rest.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _microseconds(seconds: Sequence[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return median(known) * 1e6 if known and len(known) == len(seconds) else None
