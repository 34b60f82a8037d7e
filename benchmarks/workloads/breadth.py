"""How costs grow with the number of queues of one worker, and of handlers of one message.

A look, an empty claim and a drain, of so many queues; a transaction with one broadcast, of which
so many handlers get a copy.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

from django.db import transaction

from benchmarks import bare
from benchmarks.app.handlers import SPREAD
from benchmarks.claims import Claimer
from benchmarks.database import check
from benchmarks.growing import grown, milliseconds
from benchmarks.report import Row
from benchmarks.workers import drained
from benchmarks.workloads import Bench
from django_mq import broadcast, handler
from django_mq.handlers import isolated
from django_mq.store import poll

DAY = 86_400.0
TIMES = 20
QUEUES = (1, 10, 100)
COPIES = (1, 5, 20)


def run(bench: Bench) -> list[Row]:
    """Queues, then copies."""
    rows = [*_queues(bench), *_copies(bench)]
    bench.database.clear()
    return rows


def _queues(bench: Bench) -> list[Row]:
    """A worker of many queues: with nothing due in any, and with all that is due spread over
    them."""
    looks, claims, drains = {}, {}, {}
    count = bench.size(50_000, 3_000)
    database = bench.database
    for number in QUEUES:
        names = SPREAD[:number]
        database.clear()
        for name in names:
            database.fill(10, queue=name, after=DAY)
        database.settle()
        with Claimer("ours", names) as ours:
            ours.warm_up()
            claims[f"{number:,}"] = median(ours.take().milliseconds for _ in range(TIMES))
            looks[f"{number:,}"] = milliseconds(lambda ours=ours: poll.poll(ours.cursor))
        rates = []
        for _ in bench.in_turn(f"growth: {number} queues"):
            database.clear()
            for name in names:
                database.fill(count // number, "bench.spread", queue=name)
            database.settle()
            rates.append(count / drained(database, count // number * number).seconds)
        drains[f"{number:,}"] = median(rates)
    note = "ten delayed messages in each"
    return [
        *grown("growth: queues, look at {} with nothing due", looks, "ms", note),
        *grown("growth: queues, claim from {} with nothing due", claims, "ms", note),
        *grown("growth: queues, drain of {}", drains, "msg/s", f"{count:,} messages in all"),
    ]


def _copies(bench: Bench) -> list[Row]:
    """A transaction with one broadcast: each handler that matches gets a row of its own."""
    times = bench.size(1_000, 100)
    rates, notes = {}, {}
    database = bench.database
    for number in COPIES:
        database.clear()
        with isolated():
            for copy in range(number):
                handler(f"bench.fan{number}", name=f"bench.fan{number}.{copy}")(lambda _: None)
            _broadcast(f"bench.fan{number}", 100)
            began = perf_counter()
            _broadcast(f"bench.fan{number}", times)
            rate = times / (perf_counter() - began)
        check(database.count() == (times + 100) * number, "copies are missing or doubled")
        rates[f"{number:,}"] = rate
        notes[f"{number:,}"] = f"{rate * number:,.0f} copies per second"
    return grown("growth: copies, {} per broadcast", rates, "tx/s", notes)


def _broadcast(type: str, times: int) -> None:
    for _ in range(times):
        with transaction.atomic():
            broadcast(type, bare.PAYLOAD)
