"""Four worker processes whose handlers each update one of 500 counters, in no common order.

Several handlers in one transaction keep each other's rows locked, and deadlock. Against it: the
same worker with one message a transaction (SLICE_SECONDS so small that each slice is over after
its first message), and the bare loop with one message a transaction, also in four processes.
"""

from __future__ import annotations

from benchmarks import bare
from benchmarks.database import check, counters
from benchmarks.report import Row, compared
from benchmarks.workers import Worker
from benchmarks.workloads import Bench

PROCESSES = 4
COUNTERS = 500


def run(bench: Bench) -> list[Row]:
    """All three in turn; every counter is verified, and that no attempt was charged."""
    count = bench.size(20_000, 2_000)
    ours, singly, driver, repeats = [], [], [], []
    for _ in bench.in_turn("contention"):
        rate, repeated = _worker_rate(bench, count)
        ours.append(rate)
        repeats.append(repeated)
        singly.append(_worker_rate(bench, count, SLICE_SECONDS=1e-6)[0])
        driver.append(_bare_rate(bench, count))
    note = (
        f"{count:,} messages, {PROCESSES} processes, {COUNTERS} counters; no attempt charged,"
        f" repeated calls: {max(repeats)}; against: "
    )
    return [
        compared("contention", ours, singly, at_least=0.5, note=f"{note}one message a slice"),
        compared("contention, bare loop", ours, driver, at_least=0.5, note="one per transaction"),
    ]


def _worker_rate(bench: Bench, count: int, **settings: float) -> tuple[float, int]:
    """Return messages a second, and how many calls of handlers were undone and repeated."""
    database = bench.database
    _prepare(bench, count)
    due = database.ids()
    with Worker(
        database, "--until-empty", processes=PROCESSES, expected=count, **settings
    ) as worker:
        seen = worker.wait()
    check(set(seen.ids) == due, f"{len(due - set(seen.ids))} messages were not handled")
    check(not database.ids(), "messages were handled but not removed")
    charged = database.count(table="django_mq_failedattempt")
    check(not charged, f"{charged} attempts were charged")
    _verify_counters(bench, count)
    return count / seen.seconds, len(seen.ids) - count


def _bare_rate(bench: Bench, count: int) -> float:
    _prepare(bench, count)
    done = bare.contend(bench.database.params(), PROCESSES)
    check(len(done.ids) == len(set(done.ids)) == count, "the bare loop lost messages")
    _verify_counters(bench, count)
    return count / (done.end - done.begin)


def _prepare(bench: Bench, count: int) -> None:
    bench.database.clear()
    counters(COUNTERS)
    bench.database.fill(count, "bench.count")
    bench.database.settle()


def _verify_counters(bench: Bench, count: int) -> None:
    """Each message counted once: `fill` spreads them evenly over the counters."""
    each = count // COUNTERS
    wrong = bench.database.count(f"value <> {each}", table="bench_counter")
    check(not wrong, f"{wrong} counters are wrong: handlers' writes were lost or doubled")
