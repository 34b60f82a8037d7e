"""A worker's memory over many messages: does it grow, and how large is it at most?

Both are of the child process that runs handlers, as the system counts pages in RAM (pages that
it shares with its supervisor included). The first fifth is left out of the slope: caches fill,
and the allocator takes what it needs for full batches.
"""

from __future__ import annotations

from statistics import linear_regression

from benchmarks.database import check
from benchmarks.report import Row, limited
from benchmarks.workers import drained
from benchmarks.workloads import Bench

MEGABYTE = 1024 * 1024
SAMPLES = 100
PER = 50_000


def run(bench: Bench) -> list[Row]:
    """Growth in MB for 50,000 messages, and the peak."""
    count = bench.size(200_000, 20_000)
    database = bench.database
    database.clear()
    database.fill(count)
    database.settle()
    seen = drained(database, count, every=count // SAMPLES)
    check(seen.peak_bytes, "this system has no /proc: memory cannot be measured")
    settled = seen.steps[len(seen.steps) // 5 :]
    slope, _ = linear_regression([step[0] for step in settled], [step[2] for step in settled])
    grew = slope * PER / MEGABYTE
    first, last = (step[2] / MEGABYTE for step in (settled[0], settled[-1]))
    return [
        limited(
            "memory, growth",
            grew,
            f"MB / {PER:,}",
            at_most=1.0,
            note=f"{count:,} messages; {first:.1f} MB after a fifth, {last:.1f} at the end",
        ),
        limited("memory, peak", seen.peak_bytes / MEGABYTE, "MB", at_most=120.0),
    ]
