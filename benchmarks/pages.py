"""Writes docs/benchmarks.md, its charts, and the figures of other pages from measured results.

    python -m benchmarks.pages results.json [more.json ...]

The files are what `python -m benchmarks --json` wrote. Without any, the pages are written again
from docs/benchmarks/results.json, where everything is kept that they are made of. With some, what
they measured replaces what is there; `--fresh` forgets it first.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparing import PEERS, REAL, absent, comparisons, titled
from benchmarks.markdown import plain, rows_table
from benchmarks.plots import courses
from benchmarks.predicting import predictions
from benchmarks.report import Row
from benchmarks.results import Run, read, rows_of, shown, write

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- (rows|model): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

#: Tables of the section on real work, and how the names of their rows begin.
WORK = {
    "Broadcasts and handlers": ("fan-out", "broadcast", "writing", "contention"),
    "Keys, order, unique ids, history, lists, queues, figures": ("drain, ",),
}
#: Drains without any of these.
BARE = ("drain, bare loop on a plain table", "drain, two processes", "drain, two bare loops")

INTRODUCTION = """\
# Benchmarks

<!-- Written by `python -m benchmarks.pages`: change that, not this. -->

This page shows how fast django_mq is on one small machine, compared with the bare driver and with
other queues in PostgreSQL. To run the benchmarks yourself, see
[benchmarks/README.md](../benchmarks/README.md), which has the commands and explains what each row
measures and compares. [Scaling](scaling.md) shows how the figures change with the load.

## Method

- Absolute figures depend on the machine and the hour, so read the ratios. Compared programs ran in
  turns, round after round; a ratio is the median of the rounds' ratios. The runs listed under
  "Measured with" used machines that differ in speed by up to four times, so figures of different
  runs cannot be compared.
- Every figure is verified: exactly the due messages were handled, each once, and none is left.
  Otherwise the row has no figure, and gives the reason.
- The worker is the real `mq_worker` with default settings, unless the row says otherwise; the bare
  loop is psycopg with its own defaults on the same rows.
- django_mq and the Python peers enqueue jobs as a Django project with stock settings does; payloads
  and job objects are built while the clock runs.
- CPU is in microseconds per message, for the worker's process with all its threads and for its
  backends. It varies less than a rate. Rates from a machine that also did other work are not shown.
- This page shows every target, met or missed, and every peer that was measured. All rows are in
  [results.json](benchmarks/results.json).

## What the figures contain

The bare loop deletes the rows that it reads, runs them and commits. django_mq promises more, and
its figures include the cost:

- Before a handler starts, its attempt is on disk: a claim is an UPDATE of the row, with its own
  commit and flush. Each message is therefore written twice, and a start after a commit takes one
  more flush and one more round trip.
- Then the row is locked, in the transaction that will remove it, which takes another round trip. A
  single message that was claimed just now does not wait for the end of this round trip. For
  handlers that do not use their connection, such as no-ops, nothing is locked. "drain, expires"
  shows the rate with the lock, and "writing" the rate of handlers that write.
- A broadcast is one more INSERT in the caller's transaction, into a table whose constraints apply
  to every writer.
"""


def main() -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--docs", type=Path, default=DOCS, help="default: the project's docs/")
    options = parser.parse_args()
    kept = options.docs / "benchmarks/results.json"
    before = [kept] if kept.exists() and not options.fresh else []
    runs = read([*before, *options.results])
    if not runs:
        parser.error("there are no results yet: name a file")
    write(kept, runs)
    write_pages(options.docs, runs)
    return 0


def write_pages(docs: Path, runs: Sequence[Run]) -> None:
    """Write page, charts, and the figures of scaling.md and guarantees.md, if they are there."""
    rows = rows_of(runs)
    drawn = charts(shown(runs))
    (docs / "benchmarks").mkdir(exist_ok=True)
    for old in (docs / "benchmarks").glob("*.svg"):
        old.unlink()
    for name, svg in drawn.items():
        (docs / "benchmarks" / name).write_text(svg)
    (docs / "benchmarks.md").write_text(page(runs))
    for name in ("scaling.md", "guarantees.md"):
        if (docs / name).exists():
            (docs / name).write_text(filled((docs / name).read_text(), rows))


def charts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the charts by the names of their files."""
    drawn = {file_name(each.what): each.chart() for each in comparisons(rows) if len(each.rows) > 1}
    for row in rows:
        if row.series:
            most = max(len(values) for values in row.series.values())
            steps = [str(step) for step in range(1, most + 1)]
            drawn[file_name(row.workload)] = courses(
                titled(row.workload), "", row.unit, row.series, steps
            )
    return drawn


def file_name(title: str) -> str:
    """Return the name of a chart's file.

    >>> file_name("Drain, 1 process (100%)")
    'drain-1-process-100.svg'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".svg"


def page(runs: Sequence[Run]) -> str:
    """Return docs/benchmarks.md."""
    rows = shown(runs)
    # What users do comes before the no-ops, and what others do before our own targets.
    sections = (_real(rows), _peers(rows), _targets(rows), _courses(rows), _circumstances(runs))
    parts = [INTRODUCTION, *(part for section in sections for part in section)]
    return "\n".join(parts).rstrip() + "\n"


def _circumstances(runs: Sequence[Run]) -> list[str]:
    """List the circumstances of each run, and the workloads that it measured."""
    parts = ["## Measured with\n"]
    for run in runs:
        told = ", ".join(f"{name} {value}" for name, value in run.circumstances.items())
        names = dict.fromkeys(re.split("[,:]", row.workload)[0] for row in run.rows)
        parts.append(f"- {plain(told)}: {plain(', '.join(names))}.")
    return [*parts, ""]


def _targets(rows: Sequence[Row]) -> list[str]:
    aimed = [row for row in rows if row.target]
    met = [row for row in aimed if row.ok]
    wrong = [row for row in rows if row.figure != row.figure]
    if not aimed and not wrong:
        return []
    parts = ["## Targets\n", f"{len(met)} of {len(aimed)} are met.\n"]
    if aimed:
        parts.append(rows_table(aimed))
    if wrong:
        parts.append("\nNot counted, since something did not do its work:\n")
        parts += [f"- {plain(row.workload)}: {plain(row.note)}" for row in wrong]
    return [*parts, ""]


def _real(rows: Sequence[Row]) -> list[str]:
    """Return the section on real work, then the costs of options of messages."""
    parts = _compared(rows, REAL)
    for title, names in WORK.items():
        wanted = [row for row in rows if row.workload.startswith(names)]
        wanted = [row for row in wanted if row.workload not in BARE and row.figure == row.figure]
        if wanted:
            parts += [f"### {title}\n", rows_table(wanted), ""]
    return ["## Real work\n", *parts] if parts else []


def _peers(rows: Sequence[Row]) -> list[str]:
    parts = _compared(rows, PEERS)
    for who, row in absent(rows).items():
        parts.append(f"{plain(who)}: {plain(row.note)}.\n")
    return ["## Beside others\n", *parts] if parts else []


def _compared(rows: Sequence[Row], prefix: str) -> list[str]:
    parts = []
    for each in sorted(comparisons(rows, prefix), key=lambda one: "drain" in one.what):  # last
        parts.append(f"### {plain(each.title)}\n")
        if len(each.rows) > 1:
            parts.append(f"![{plain(each.title)}](benchmarks/{file_name(each.what)})\n")
        parts += [each.table(), ""]
    return parts


def _courses(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row.series]
    if not found:
        return []
    parts = ["## Over time\n"]
    for row in found:
        name = plain(titled(row.workload))
        parts.append(f"![{name}](benchmarks/{file_name(row.workload)})\n")
        if row.note:
            parts.append(f"{plain(titled(row.note))}.\n")
    return parts


def filled(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the tables between its marks written again.

    `<!-- rows: growth: backlog; backlog -->` is for the rows whose names begin with one of these,
    `<!-- model: rates -->` for one of the model's tables; `<!-- end -->` ends each.
    """

    def table(found: re.Match[str]) -> str:
        kind, name = found[2], found[3]
        names = tuple(name.split("; "))
        chosen = [row for row in rows if row.workload.startswith(names)]
        if kind == "model":
            written = predictions(name, rows)
        elif chosen:
            written = rows_table(chosen, without=f"{name}, ")
        else:
            written = "Not measured yet."
        return f"{found[1]}\n{written}\n\n{found[5]}"

    return BLOCK.sub(table, text)


if __name__ == "__main__":
    sys.exit(main())
