"""Django's tasks: `enqueue()` and their drain by our backend, against others in PostgreSQL.

All by the API of Django's tasks alone, with the same task, arguments and business row, and all
keep a result of each task. CPU is that of the process that enqueues or runs the tasks, and of the
backends of its connections, for each task: it is the steadier figure on a machine that is busy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter, process_time
from typing import Any

from django.conf import settings
from django.db import connection, transaction

from benchmarks import bare
from benchmarks.database import Database, check
from benchmarks.footprints import Cost, backend_seconds
from benchmarks.peers.board import Board
from benchmarks.peers.catalog import TASK_BACKENDS
from benchmarks.peers.driving import Driven
from benchmarks.peers.ours import OURS
from benchmarks.report import Row
from benchmarks.workers import Worker, drained, until_empty, verify
from benchmarks.workloads import Bench
from benchmarks.workloads.broadcast import insert_order
from benchmarks.workloads.peers import installed

ENQUEUE, ENQUEUE_CPU = "tasks, enqueue one per transaction", "tasks, Python's CPU of an enqueue"
BULK = "tasks, enqueue in one transaction"
DRAIN, TWO = "tasks, drain, 1 process", "tasks, drain, 2 processes"
DRAIN_CPU = "tasks, Python's CPU of a drain"
SERVER_CPU = "tasks, PostgreSQL's CPU of a drain"
#: Seconds after which a drain of theirs is stopped; its rate is that of what was done until then.
LIMIT = 30.0

NOT_ONE = """
select count(*)
  from bench_order o
  full join (
       select (payload->'kwargs'->>'number')::bigint as id, count(*) as tasks
         from django_mq_queuedmessage group by 1) m using (id)
 where o.id is null or m.tasks is distinct from 1
"""


def run(bench: Bench) -> list[Row]:
    """All in every round, one after the other."""
    if not settings.BENCH_TASKS:
        note = "not measured: Django 5.2 needs the extra `tasks`"
        return [Row(workload="peers: tasks", figure=0.0, unit="", note=note)]
    board = Board()
    with ExitStack() as stack:
        bench.database.clear()
        peers, absent = installed(bench, stack, TASK_BACKENDS, "peers: tasks")
        for _ in bench.in_turn("tasks"):
            _round(bench, board, peers)
    _say_how_many(bench, board, peers)
    others = [peer.title for peer in peers]
    rows: list[Row] = []
    for what in (ENQUEUE, BULK, DRAIN, TWO):
        rows += board.rates(what, OURS, others)
    seen = (SERVER_CPU,) if backend_seconds(bench.database) is not None else ()
    for what in (ENQUEUE_CPU, DRAIN_CPU, *seen):
        rows += board.times(what, OURS, others)
    return [*rows, *absent]


def _say_how_many(bench: Bench, board: Board, peers: list[Driven]) -> None:
    for title in (OURS, *(peer.title for peer in peers)):
        board.note(BULK, title, f"{_few(bench):,} tasks")
    for processes, what in ((1, DRAIN), (2, TWO)):
        board.note(what, OURS, f"{processes * _many(bench):,} tasks")
        for peer in peers:
            board.note(what, peer.title, f"{processes * _few(bench):,} tasks or {LIMIT:g} s")


def _round(bench: Bench, board: Board, peers: list[Driven]) -> None:
    count, warm_up = bench.size(2_000, 150), bench.size(300, 50)
    enqueuing = ENQUEUE, ENQUEUE_CPU
    board.measure(enqueuing, OURS, _of(OURS, _enqueued), bench.database, count, warm_up)
    for peer in peers:
        board.measure(enqueuing, peer.title, _of(peer.title, peer.enqueue), count, warm_up)
    board.measure((BULK,), OURS, _stored, bench.database, _few(bench))
    for processes, whats in ((1, (DRAIN, DRAIN_CPU, SERVER_CPU)), (2, (TWO,))):
        ours = _of(OURS, _drained)
        board.measure(whats, OURS, ours, bench.database, processes * _many(bench), processes)
        both = (DRAIN, BULK, DRAIN_CPU, SERVER_CPU) if processes == 1 else whats
        for peer in peers:
            board.measure(both, peer.title, _theirs, peer, _few(bench), processes)


def _of(title: str, measure: Callable[..., Cost]) -> Callable[..., dict[str, tuple[float, ...]]]:
    def measured(*arguments: Any) -> dict[str, tuple[float, ...]]:
        return {title: _figures(measure(*arguments))}

    return measured


def _figures(cost: Cost) -> tuple[float, ...]:
    """The rate, and the milliseconds of CPU that are known."""
    seconds = [each for each in (cost.python, cost.postgres) if each is not None]
    return cost.rate, *(1000 * each for each in seconds)


def _enqueued(database: Database, count: int, warm_up: int) -> Cost:
    """A row by a plain cursor and one task, in a transaction."""
    from benchmarks.app.tasks import noop

    def one() -> None:
        with transaction.atomic():
            noop.enqueue(**{**bare.PAYLOAD, "number": insert_order("task")})

    database.clear()
    database.settle()
    for _ in range(warm_up):
        one()
    began, cpu = perf_counter(), process_time()
    for _ in range(count):
        one()
    seconds, cpu = perf_counter() - began, process_time() - cpu
    check(database.count() == count + warm_up, "tasks are missing or doubled")
    check(database.execute(NOT_ONE) == [(0,)], "an order has not exactly one task")
    return Cost(count / seconds, cpu / count, None)


def _stored(database: Database, count: int) -> dict[str, tuple[float, ...]]:
    return {OURS: (_fill(database, count),)}


def _fill(database: Database, count: int) -> float:
    """Enqueue so many in one transaction; return the rate."""
    from benchmarks.app.tasks import noop

    database.clear()
    began = perf_counter()
    with transaction.atomic():
        ids = [noop.enqueue(**{**bare.PAYLOAD, "number": n}).id for n in range(count)]
    seconds = perf_counter() - began
    connection.close()  # the CPU of its backend is no worker's
    check({int(id) for id in ids} == database.ids(), "what is stored is not what was enqueued")
    return count / seconds


def _drained(database: Database, count: int, processes: int) -> Cost:
    _fill(database, count)
    database.settle()
    if processes > 1:
        cost = Cost(count / drained(database, count, processes=processes).seconds, None, None)
    else:
        due = database.ids()
        with Worker(database, expected=count) as worker:
            until_empty(database, 600)
            postgres = backend_seconds(database)
            seen = worker.stop()
        verify(database, due, seen.ids)
        server = None if postgres is None else postgres / count
        cost = Cost(count / seen.seconds, seen.cpu_seconds / count, server)
    kept = database.count("error_class = '' and payload is not null", "django_mq_result")
    check(kept == count, f"{kept} results of {count} tasks")
    return cost


def _theirs(peer: Driven, count: int, processes: int) -> dict[str, tuple[float, ...]]:
    peer.clear()
    peer.settle()
    bulk, due = peer.bulk(processes * count)
    peer.settle()
    rate, *cpu = _figures(peer.drain(due, processes, LIMIT))
    return {peer.title: (rate, bulk, *cpu) if processes == 1 else (rate,)}


def _many(bench: Bench) -> int:
    return bench.size(10_000, 1_000)


def _few(bench: Bench) -> int:
    return bench.size(3_000, 200)
