"""`python -m benchmarks`: one command, one table."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.database import Database
    from benchmarks.report import Row


def main() -> int:
    """Return 1 if a measured program did not do its work; a missed target is not an error."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    os.environ.pop("MQ_BENCH_RECORDING", None)
    import django

    django.setup()

    from benchmarks.database import databases
    from benchmarks.report import as_table, write_json
    from benchmarks.workloads import NAMES

    options = _parse(NAMES)
    with databases() as database:
        circumstances = _circumstances(database)
        circumstances["rounds"] = options.rounds
        circumstances["quick"] = options.quick
        if options.busy:
            circumstances["busy"] = True
        rows = _run(database, options)
    if options.json:
        write_json(options.json, rows, **circumstances)
    line = ", ".join(f"{name} {value}" for name, value in circumstances.items())
    table = as_table(rows, markdown=options.markdown)
    sys.stdout.write(f"{line}\n\n{table}\n")
    return 1 if any(row.figure != row.figure for row in rows) else 0


def _parse(names: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--quick", action="store_true", help="small: does it run, not how fast")
    parser.add_argument("--rounds", type=int, help="default 5, with --quick 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument(
        "--busy", action="store_true", help="others use the machine: pages show no rates, only CPU"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.only = options.only or list(names)
    return options


def _run(database: Database, options: argparse.Namespace) -> list[Row]:
    from benchmarks.database import Wrong
    from benchmarks.report import failed
    from benchmarks.workloads import Bench

    bench = Bench(database, rounds=options.rounds, quick=options.quick)
    rows: list[Row] = []
    for name in options.only:
        workload = import_module(f"benchmarks.workloads.{name}")
        try:
            rows += workload.run(bench)
        except Wrong as wrong:
            rows.append(failed(name, str(wrong)))
        except Exception as error:  # a failed workload does not stop the others
            traceback.print_exc()
            rows.append(failed(name, repr(error)))
    return rows


def _circumstances(database: Database) -> dict[str, object]:
    import django
    import psycopg

    ((server, fsync, synchronous),) = database.execute(
        "select current_setting('server_version'), current_setting('fsync'),"
        " current_setting('synchronous_commit')"
    )
    return {
        "PostgreSQL": server.split()[0],
        "fsync": fsync,
        "synchronous_commit": synchronous,
        "Python": platform.python_version(),
        "Django": django.__version__,
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "cores": os.cpu_count(),
        "load at the start": f"{os.getloadavg()[0]:.1f}",
    }


if __name__ == "__main__":
    sys.exit(main())
