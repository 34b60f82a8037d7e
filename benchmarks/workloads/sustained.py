"""Five minutes of full load: one worker, with 20,000 messages kept waiting for it all the while.

The rate at the end against that at the start, and how large table and indexes are after each sixth.
Both rates are of the line that fits those of 60 windows: two windows alone differ by more than what
is asked. Vacuum comes as the server and the worker have it; nothing else helps. What feeds the
worker is this process: it knows from the worker how many handlers were called, and stores as many
new messages, by SQL.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import linear_regression, median
from time import monotonic, sleep

from benchmarks.database import Database, check
from benchmarks.report import Row, compared, limited
from benchmarks.workers import Seen, Worker, until_empty
from benchmarks.workloads import Bench

SIXTHS = 6
WINDOWS = 60
#: It is long: not more often, however many rounds there are.
MOST_RUNS = 3
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
    """The result of a run, by sixths.

    `stored`: the messages stored. `times`: when each sixth ended. `sizes`: the sizes of the tables
    at these times. `least`: the smallest number of waiting messages.
    """

    stored: int
    least: int = WAITING
    times: list[float] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)


def run(bench: Bench) -> list[Row]:
    """Up to three runs: each is its own comparison."""
    seconds = float(bench.size(300, 6))
    runs = min(bench.rounds, MOST_RUNS)
    begins, ends, series = [], [], {}
    all_fed: list[Fed] = []
    for number in range(1, runs + 1):
        sys.stderr.write(f"sustained: run {number} of {runs}, {seconds:g} s each\n")
        fed, seen = _work(bench.database, seconds)
        begin, end = ends_of_line(per_second(seen.steps, windows(fed.times)))
        begins.append(begin)
        ends.append(end)
        series[f"run {number}"] = per_second(seen.steps, fed.times)
        all_fed.append(fed)
    note = (
        f"the end of {seconds:g} s against the start;"
        f" sixths {' / '.join(map(_shown, series.values()))};"
        f" {sum(fed.stored for fed in all_fed):,} messages,"
        f" at least {min(fed.least for fed in all_fed):,} waited"
    )
    tables, indexes = (
        [median(fed.sizes[sixth][which] / MEGABYTE for fed in all_fed) for sixth in range(SIXTHS)]
        for which in (0, 1)
    )
    return [
        compared("sustained", ends, begins, at_least=0.95, note=note, series=series),
        replace(_size("table", tables), series={"table": tables, "indexes": indexes}),
        _size("indexes", indexes),
    ]


def windows(times: Sequence[float]) -> list[float]:
    """Return the edges of equally long windows from the first to the last of `times`."""
    begin, length = times[0], times[-1] - times[0]
    return [begin + length * number / WINDOWS for number in range(WINDOWS + 1)]


def ends_of_line(rates: Sequence[float]) -> tuple[float, float]:
    """Return where the line of least squares through `rates` begins and ends.

    It counts each window, so that one that was disturbed matters little.

    >>> ends_of_line([10.0, 20.0, 30.0]), ends_of_line([50.0, 20.0, 50.0])
    ((10.0, 30.0), (40.0, 40.0))
    """
    slope, begin = linear_regression(range(len(rates)), rates)
    return begin, begin + slope * (len(rates) - 1)


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
