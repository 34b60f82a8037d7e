"""Measures django_mq and the bare driver with the code of the other workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

import psycopg

from benchmarks import bare
from benchmarks.database import Database, check
from benchmarks.footprints import Cost
from benchmarks.report import Row
from benchmarks.workers import drained, verify
from benchmarks.workloads import Bench, bulk, drain, latency
from benchmarks.workloads.broadcast import INSERT, NOT_ONE, STORE, insert_and_broadcast

OURS = "django_mq"
BARE = "bare psycopg"

Figures = dict[str, tuple[float | Cost, ...]]


def enqueued(bench: Bench, count: int, warm_up: int) -> Figures:
    """Transactions a second: a row by a plain cursor, and one message; Django as it comes."""
    database = bench.database
    database.clear()
    database.settle()
    ours = _rate(insert_and_broadcast, count, warm_up)
    check(database.count() == count + warm_up, "messages are missing or doubled")
    check(database.execute(NOT_ONE) == [(0,)], "an order has not exactly one message")
    with database.connect(autocommit=False) as driver:
        plain = _rate(lambda: _insert_both(driver), count, warm_up)
    check(database.count(table=bare.TABLE) == count + warm_up, "rows are missing")
    return {OURS: (ours,), BARE: (plain,)}


def stored_at_once(bench: Bench) -> Figures:
    """Messages a second of broadcast_many() of a list, and of COPY."""
    row = _row(bulk.run(replace(bench, rounds=1)), "bulk")
    return {OURS: (row.figure,), BARE: (row.against or 0.0,)}


def drained_by(database: Database, count: int, processes: int = 1) -> Figures:
    """Messages a second of both, on the same table."""
    worker = drain.worker_cost(database, count, processes)
    return {OURS: (worker,), BARE: (drain.bare_rate(database, count, processes),)}


def drained_beside(database: Database, count: int) -> Figures:
    """Messages per second of both, beside the rows that are already in the table."""
    database.fill(count)
    database.settle()
    worker = count / drained(database, count).seconds
    database.fill(count)
    database.settle()
    due = database.ids()
    done = bare.drain(database.params())
    verify(database, due, done.ids)
    return {OURS: (worker,), BARE: (count / (done.end - done.begin),)}


def waited(bench: Bench) -> Figures:
    """Median and 99th percentile of both, in milliseconds from COMMIT to handler."""
    rows = latency.run(replace(bench, rounds=1))
    median, last = _row(rows, "latency, median"), _row(rows, "latency, 99th percentile")
    return {
        OURS: (median.figure, last.figure),
        BARE: (median.against or 0.0, last.against or 0.0),
    }


def _insert_both(driver: psycopg.Connection[Any]) -> None:
    driver.execute(INSERT, ("bare both",)).fetchone()
    driver.execute(STORE, (bare.PAYLOAD_TEXT,))
    driver.commit()


def _rate(enqueue: Callable[[], None], count: int, warm_up: int) -> Cost:
    for _ in range(warm_up):
        enqueue()
    began, cpu = perf_counter(), process_time()
    for _ in range(count):
        enqueue()
    return Cost(count / (perf_counter() - began), (process_time() - cpu) / count)


def _row(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.workload == name)
