"""From commit to the start of the handler, with an idle worker: one message each 100 ms.

Between two messages for the worker comes one for the bare loop, which is idle just as long: it
LISTENs, and deletes when a NOTIFY comes. Both are timed from the moment at which the producer's
COMMIT returned; the worker's first line of the handler and the loop's fetched row end the time.
A few messages before the first round are not counted: connections and statements are made then.
"""

from __future__ import annotations

import multiprocessing
from statistics import median
from time import monotonic, sleep
from typing import Any

import psycopg
from django.db import transaction

from benchmarks import bare
from benchmarks.database import check
from benchmarks.report import Row, limited, percentile
from benchmarks.workers import Worker, until_empty
from benchmarks.workloads import Bench
from django_mq import broadcast

EVERY = 0.1
WARM_UP = 5
STORE = f"insert into {bare.TABLE} (payload) values (%s::jsonb) returning id"


def run(bench: Bench) -> list[Row]:
    """Median and 99th percentile of both; of several rounds, the median of each."""
    count = bench.size(100, 20)
    database = bench.database
    database.clear()
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Event(), context.Queue()
    loop = context.Process(target=bare.listen, args=(database.params(), ready, answers))
    loop.start()
    try:
        with Worker(database) as worker, database.connect() as producer:
            worker.until_alive()
            check(ready.wait(60), "the bare loop did not start")
            _produce(producer, WARM_UP)
            rounds = [_produce(producer, count) for _ in bench.in_turn("latency")]
            producer.execute(f"notify {bare.CHANNEL}, 'end'")
            bare_starts = dict(answers.get(timeout=60))
            until_empty(database, 10)
            seen = worker.stop()
    finally:
        loop.terminate()
        loop.join()
    ours = [_waits(commits, seen.starts) for commits, _ in rounds]
    others = [_waits(commits, bare_starts) for _, commits in rounds]
    handled = WARM_UP + count * len(rounds)
    check(len(seen.starts) == handled and not database.count(), "messages were not handled once")
    note = f"commit to handler, {count} messages a round, one every {EVERY * 1000:g} ms"
    return [
        _row("latency, median", ours, others, 0.5, at_most=1.0, note=note),
        _row("latency, 99th percentile", ours, others, 0.99, note=""),
    ]


def _row(
    name: str,
    ours: list[list[float]],
    others: list[list[float]],
    share: float,
    *,
    at_most: float | None = None,
    note: str,
) -> Row:
    each = [percentile(waits, share) for waits in ours]
    spread = f"rounds {min(each):.2f} to {max(each):.2f}"
    return limited(
        name,
        median(each),
        "ms",
        at_most=at_most,
        against=median(percentile(waits, share) for waits in others),
        note="; ".join(filter(None, (spread, note))),
    )


def _produce(
    producer: psycopg.Connection[Any], count: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Send `count` messages to each; return when each was committed, by id."""
    ours: dict[int, float] = {}
    others: dict[int, float] = {}
    at = monotonic()
    for _ in range(count):
        at += EVERY / 2
        sleep(max(0.0, at - monotonic()))
        id, committed = _broadcast()
        ours[id] = committed
        at += EVERY / 2
        sleep(max(0.0, at - monotonic()))
        with producer.transaction():
            ((id,),) = producer.execute(STORE, (bare.PAYLOAD_TEXT,)).fetchall()
            producer.execute(f"notify {bare.CHANNEL}")
        others[id] = monotonic()
    sleep(EVERY)
    return ours, others


def _broadcast() -> tuple[int, float]:
    committed: list[float] = []
    with transaction.atomic():
        # Before broadcast() adds its own hook, so that the ring counts.
        transaction.on_commit(lambda: committed.append(monotonic()))
        receipt = broadcast("bench.timed", bare.PAYLOAD)
    return receipt.ids[0], committed[0]


def _waits(commits: dict[int, float], starts: dict[int, float]) -> list[float]:
    """Return milliseconds; a start may precede the COMMIT's answer by a moment."""
    check(commits.keys() <= starts.keys(), "messages were not handled")
    return [max(0.0, starts[id] - at) * 1000 for id, at in commits.items()]
