"""Five minutes of full load: one worker, with 20,000 messages kept waiting for it all the while.

The rate of the last sixth against that of the first, and how large table and indexes are at the
end of each. Vacuum comes when the server's own comes; nothing helps it. What feeds the worker is
this process: it knows from the worker how many handlers were called, and stores as many new
messages, by SQL.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic, sleep

from benchmarks.database import Database, check
from benchmarks.report import Row, compared, limited
from benchmarks.workers import Seen, Worker, until_empty
from benchmarks.workloads import Bench

SIXTHS = 6
WAITING = 20_000
#: Seconds between two looks at how many are missing.
EVERY = 0.02
#: Messages: the worker says each time how far it is; and what is stored at once, at least.
STEP = 1_000
MEGABYTE = 1024 * 1024
SIZES = """
select pg_table_size('django_mq_queuedmessage'), pg_indexes_size('django_mq_queuedmessage')
"""


@dataclass
class Fed:
    """What was stored, when each sixth ended, how large all was then, and the least that waited."""

    stored: int
    least: int = WAITING
    times: list[float] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)


def run(bench: Bench) -> list[Row]:
    """One run, however many rounds: it is its own comparison."""
    seconds = float(bench.size(300, 6))
    database = bench.database
    sys.stderr.write(f"sustained: one run of {seconds:g} s\n")
    fed, seen = _work(database, seconds)
    rates = per_second(seen.steps, fed.times)
    note = (
        f"last sixth of {seconds:g} s against the first; each {_shown(rates)};"
        f" {fed.stored:,} messages, at least {fed.least:,} waited"
    )
    sizes = {
        "table": [table / MEGABYTE for table, _ in fed.sizes],
        "indexes": [indexes / MEGABYTE for _, indexes in fed.sizes],
    }
    table, indexes = (_size(name, each) for name, each in sizes.items())
    return [
        compared(
            "sustained",
            rates[-1:],
            rates[:1],
            at_least=0.95,
            note=note,
            series={"each sixth": rates},
        ),
        replace(table, series=sizes),
        indexes,
    ]


def per_second(steps: Sequence[tuple[int, float, int]], times: Sequence[float]) -> list[float]:
    """Return the messages a second between each two times, from (messages, time, ...) as noted.

    >>> per_second([(100, 1.0, 0), (200, 2.0, 0), (300, 4.0, 0)], [1.0, 2.0, 3.0])
    [100.0, 50.0]
    """
    return [
        (_calls(steps, end) - _calls(steps, begin)) / (end - begin)
        for begin, end in pairwise(times)
    ]


def _calls(steps: Sequence[tuple[int, float, int]], at: float) -> float:
    """Return how many were called by then, as if they came evenly between two notes."""
    after = min(max(bisect_right(steps, at, key=lambda step: step[1]), 1), len(steps) - 1)
    (low, earlier, _), (high, later, _) = steps[after - 1 : after + 1]
    return low + (high - low) * (at - earlier) / (later - earlier)


def _size(name: str, sizes: Sequence[float]) -> Row:
    note = f"at the end of the last sixth, against that of the first; each {_shown(sizes)}"
    return limited(f"sustained, {name}", sizes[-1], "MB", against=sizes[0], note=note)


def _shown(values: Sequence[float]) -> str:
    return " ".join(f"{value:,.0f}" for value in values)


def _work(database: Database, seconds: float) -> tuple[Fed, Seen]:
    database.clear()
    database.fill(WAITING)
    database.settle()
    with Worker(database, every=STEP) as worker:
        worker.until_alive()
        deadline = monotonic() + 60
        while not worker.calls():
            check(monotonic() < deadline, "the worker handled nothing")
            sleep(EVERY)
        fed = _feed(database, worker, seconds)
        until_empty(database, 60)
        seen = worker.stop()
    check(fed.least > 0, "at times nothing waited: the rate is not the worker's")
    _verify(database, fed.stored, seen.ids)
    return fed, seen


def _feed(database: Database, worker: Worker, seconds: float) -> Fed:
    """Keep messages waiting for so many seconds."""
    fed = Fed(stored=WAITING)
    begin = monotonic()
    fed.times.append(begin)
    while len(fed.sizes) < SIXTHS:
        sleep(EVERY)
        waiting = fed.stored - worker.calls()
        fed.least = min(fed.least, waiting)
        if waiting <= WAITING - STEP:
            database.fill(WAITING - waiting)
            database.execute("notify django_mq")
            fed.stored += WAITING - waiting
        now = monotonic()
        if now >= begin + seconds * len(fed.times) / SIXTHS:
            fed.times.append(now)
            fed.sizes.append(database.execute(SIZES)[0])
    return fed


def _verify(database: Database, stored: int, ids: array[int]) -> None:
    """Raise Wrong unless each message was handled, once: their ids are 1 to `stored`."""
    check(min(ids) >= 1 and max(ids) <= stored, "messages were handled that were not stored")
    times = bytearray(stored + 1)
    for id in ids:
        times[id] += 1
    check(times.count(0, 1) == 0, f"{times.count(0, 1)} messages were not handled")
    check(len(ids) == stored, f"{len(ids) - stored} messages were handled twice")
    failures = database.count(table="django_mq_failedattempt")
    check(not failures, f"{failures} attempts failed")
