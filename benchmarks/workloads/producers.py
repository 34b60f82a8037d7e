"""48 producers at once, a broadcast a transaction: with the doorbell, against without it.

As threads of one process, which rings at most each 20 ms, and as processes, of which each rings
for itself. Each has a connection of its own. Somebody listens all the while, as a worker would: a
NOTIFY that nobody hears is cheaper. Without: WAKEUP = "poll".
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import Any

from django.db import connection, transaction
from django.test.utils import override_settings

from benchmarks.bare import PAYLOAD
from benchmarks.database import Database, check
from benchmarks.report import Row, compared
from benchmarks.workloads import Bench
from django_mq import broadcast

#: Of each producer, before its time runs: its connection, statements and plans are made then.
WARM_UP = 50
#: Numbers of one producer's messages.
SPAN = 1_000_000


def run(bench: Bench) -> list[Row]:
    """Threads with and without, processes with and without, in turn."""
    producers, seconds = bench.size(48, 8), float(bench.size(5, 1))
    kinds = {"threads": (1, producers), "processes": (producers, 1)}
    on: dict[str, list[float]] = {kind: [] for kind in kinds}
    off: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in bench.in_turn("producers"):
        for kind, sizes in kinds.items():
            on[kind].append(rate(bench.database, *sizes, seconds, wakeup="notify"))
            off[kind].append(rate(bench.database, *sizes, seconds, wakeup="poll"))
    note = f"{producers} at once, {seconds:g} s; against: WAKEUP = 'poll'"
    targets = {"threads": 0.9, "processes": 0.65}
    return [
        compared(
            f"producers, {kind}",
            on[kind],
            off[kind],
            unit="tx/s",
            at_least=targets[kind],
            note=note,
        )
        for kind in kinds
    ]


def rate(database: Database, processes: int, threads: int, seconds: float, *, wakeup: str) -> float:
    """Return transactions a second of all together; verifies that each message is there, once."""
    database.clear()
    database.settle()
    connection.close()  # before the fork: two processes on one connection are none
    context = multiprocessing.get_context("fork")
    together, answers = context.Barrier(processes * threads), context.Queue()
    started = [
        context.Process(target=_process, args=(number, threads, seconds, wakeup, together, answers))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    try:
        with listening(database):
            told = [answers.get(timeout=seconds + 60) for _ in started]
    finally:
        for process in started:
            process.terminate()
            process.join()
    produced = [one for each in told for one in each]
    count = sum(WARM_UP + done for done, _ in produced)
    stored, different = database.execute(
        "select count(*), count(distinct (payload->>'number')::int) from django_mq_queuedmessage"
    )[0]
    check(stored == different == count, "messages are missing or doubled")
    return sum(done / took for done, took in produced)


def _process(
    number: int, threads: int, seconds: float, wakeup: str, together: Any, answers: Any
) -> None:
    def produce(thread: int) -> tuple[int, float]:
        return _produce(SPAN * (number * threads + thread), seconds, together)

    with override_settings(DJANGO_MQ={"WAKEUP": wakeup}), ThreadPoolExecutor(threads) as pool:
        answers.put(list(pool.map(produce, range(threads))))


def _produce(first: int, seconds: float, together: Any) -> tuple[int, float]:
    """Return how many transactions were committed, and in how many seconds."""
    try:
        for number in range(WARM_UP):
            _broadcast(first + number)
        together.wait(60)
        begin = now = monotonic()
        done = 0
        while now < begin + seconds:
            _broadcast(first + WARM_UP + done)
            done += 1
            now = monotonic()
        return done, now - begin
    finally:
        connection.close()


def _broadcast(number: int) -> None:
    with transaction.atomic():
        broadcast("bench.noop", {**PAYLOAD, "number": number})


@contextmanager
def listening(database: Database) -> Iterator[None]:
    """Hear the doorbell all the while."""
    ended = threading.Event()

    def hear() -> None:
        with database.connect() as listener:
            listener.execute("listen django_mq")
            while not ended.is_set():
                for _ in listener.notifies(timeout=0.2):
                    pass

    thread = threading.Thread(target=hear)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
