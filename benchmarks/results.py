"""Reads results from one or more files that `python -m benchmarks --json` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.report import Row

#: In the note of a row that was measured while others used the machine.
BUSY = "busy machine"
FIELDS = {field.name for field in fields(Row)}


@dataclass(frozen=True)
class Run:
    """The rows of one run, and its circumstances."""

    circumstances: Mapping[str, Any]
    rows: Sequence[Row]


def read(paths: Iterable[Path]) -> list[Run]:
    """Return the runs of all files: of rows of the same workload the last one stays.

    A file is what a run wrote, or what `write()` wrote.
    """
    runs: list[Run] = []
    for path in paths:
        data = json.loads(path.read_text())
        for each in data.get("runs", [data]):
            circumstances = {name: value for name, value in each.items() if name != "rows"}
            rows = [Row(**{k: v for k, v in row.items() if k in FIELDS}) for row in each["rows"]]
            runs.append(Run(circumstances, rows))
    return latest(runs)


def latest(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without rows that a later run measured again.

    >>> old, new = (Run({"n": n}, [Row(workload="drain", figure=n, unit="")]) for n in (1, 2))
    >>> [(run.circumstances, len(run.rows)) for run in latest([old, new])]
    [({'n': 2}, 1)]
    """
    kept: list[Run] = []
    known: set[str] = set()
    for run in reversed(runs):
        rows = [row for row in run.rows if row.workload not in known]
        known.update(row.workload for row in run.rows)
        if rows:
            kept.append(Run(run.circumstances, rows))
    return kept[::-1]


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write the runs to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [{**run.circumstances, "rows": [asdict(row) for row in run.rows]} for run in runs]
    path.write_text(json.dumps({"runs": data}, indent=1) + "\n")


def shown(runs: Iterable[Run]) -> list[Row]:
    """Return the rows of all runs that a page shows: no rates of a machine that was busy.

    A run is marked by `busy` among its circumstances, a row by its note. Of those only rows of CPU
    count, and failures.

    >>> rows = [Row(workload=name, figure=1, unit="") for name in ("drain", "CPU of a drain")]
    >>> [row.workload for row in shown([Run({"busy": True}, rows)])]
    ['CPU of a drain']
    """
    return [
        row
        for run in runs
        for row in run.rows
        if not (run.circumstances.get("busy") or BUSY in row.note)
        or "CPU" in row.workload
        or row.figure != row.figure
    ]


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Return the rows of all runs."""
    return [row for run in runs for row in run.rows]
