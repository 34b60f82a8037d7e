"""Real work before no-ops: handlers that use the ORM or wait, broadcasts with several subscribers.

With the peers that can do the same: an ORM handler, drained by one process; and coroutines that
wait 50 ms, a hundred at once on one process. Then what django_mq costs itself: a broadcast in a
transaction, handlers of lists, many queues, and the figures that workers write.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter, process_time

from django.db import connection, transaction

from benchmarks import bare
from benchmarks.app.handlers import FAN, PAUSE, PAUSES, SPREAD
from benchmarks.app.models import Order
from benchmarks.database import Database, check
from benchmarks.footprints import Cost, costs_compared
from benchmarks.peers.board import Board
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.driving import Driven
from benchmarks.peers.ours import OURS, Figures
from benchmarks.report import Row, limited
from benchmarks.workers import Seen, Worker, cost_of, drained, verify
from benchmarks.workloads import Bench
from benchmarks.workloads.broadcast import place, place_and_broadcast
from benchmarks.workloads.peers import installed
from django_mq import broadcast

ORM = "ORM handler, 1 process"
THREADS = 2
#: As PgQueuer does: one thread computes while another waits for its queries.
ON_THREADS = f"{OURS} on {THREADS} threads"
WAITS, WAITS_CPU = "coroutines of 50 ms", "coroutines of 50 ms, CPU"
#: The peers that can run a function of a Django project, and those that run coroutines or promises.
WITH_ORM = ("pgqueuer", "procrastinate", "django_tasks_db", "pgmq")
WITH_COROUTINES = ("graphile", "pgqueuer", "procrastinate", "chancy", "oban", "dbos")
#: Coroutines at once: the default of ASYNC_SLOTS, which the drivers have, too.
AT_ONCE = 100
#: Seconds after which a peer has failed.
LIMIT = 240.0
COUNTERS = 500
BLOCK = 250


def run(bench: Bench) -> list[Row]:
    """The peers' rows first, then our own."""
    once = replace(bench, rounds=1) if bench.quick else bench
    rows = [*_beside_peers(bench), *_broadcasts(bench), *_drains(once), *_figures(once)]
    bench.database.clear()
    return rows


def _beside_peers(bench: Bench) -> list[Row]:
    board = Board(prefix="real")
    names = {*WITH_ORM, *WITH_COROUTINES}
    with ExitStack() as stack:
        bench.database.clear()
        wanted = [peer for peer in PEERS if peer.name in names]
        peers, absent = installed(bench, stack, wanted, "real")
        with_orm = [peer for peer in peers if peer.peer.name in WITH_ORM]
        waiting = [peer for peer in peers if peer.peer.name in WITH_COROUTINES]
        handled, waited = bench.size(3_000, 60), bench.size(5_000, 200)
        for _ in bench.in_turn("real"):
            board.measure((ORM,), OURS, handled_with_orm, bench.database, handled)
            board.measure((ORM,), ON_THREADS, on_threads, bench.database, handled)
            for peer in with_orm:
                count = handled // 3 if peer.slow else handled
                board.measure((ORM,), peer.title, _peer_with_orm, peer, count)
            board.measure((WAITS, WAITS_CPU), OURS, waited_for, bench.database, waited)
            for peer in waiting:
                board.measure((WAITS, WAITS_CPU), peer.title, _peer_waits, peer, waited)
    others = [peer.title for peer in waiting]
    bound = waited * PAUSE / AT_ONCE
    for title in (OURS, *others):
        note = f"{waited:,} of them, {AT_ONCE} at once: at least {bound:g} s"
        board.note(WAITS, title, note)
    rows = board.rates(ORM, OURS, [peer.title for peer in with_orm], at_least=1.0)
    rows += board.rates(ORM, ON_THREADS, ())
    ours, *theirs = board.times(WAITS, OURS, others, unit="s")
    most = 1.1 * bound
    rows += [replace(ours, target=f"<= {most:g} s", ok=ours.figure <= most), *theirs]
    of = [peer.title for peer in waiting if peer.peer.name == "pgqueuer"]
    rows += board.times(WAITS_CPU, OURS, others, unit="s", at_most=1.5, rivals=of)
    return [*rows, *absent]


def handled_with_orm(database: Database, count: int) -> Figures:
    """Load, update and insert a row for each message; with default settings."""
    return {OURS: (_orm_cost(database, count),)}


def on_threads(database: Database, count: int) -> Figures:
    """The same on `THREADS` threads."""
    return {ON_THREADS: (_orm_cost(database, count, "--threads", str(THREADS)),)}


def _orm_cost(database: Database, count: int, *options: str) -> Cost:
    _prepare_orm(database)
    database.fill(count, "bench.orm")
    database.settle()
    cost = cost_of(database, count, *options)
    _verify_orm(database, count)
    return cost


def _peer_with_orm(peer: Driven, count: int) -> Figures:
    peer.clear()
    _prepare_orm(peer.database)
    _, due = peer.bulk(count)
    peer.settle()
    cost = peer.drain(due, 1, LIMIT, "orm")
    _verify_orm(peer.database, count)
    return {peer.title: (cost,)}


def _prepare_orm(database: Database) -> None:
    database.execute("truncate bench_entry, bench_counter restart identity")
    database.execute(
        "insert into bench_counter (value) select 0 from generate_series(1, %s)", (COUNTERS,)
    )


def _verify_orm(database: Database, count: int) -> None:
    [(entries, updates)] = database.execute(
        "select (select count(distinct message) from bench_entry),"
        " (select sum(value) from bench_counter)"
    )
    check(entries == updates == count, f"{entries} entries, {updates} updates of {count}")


def waited_for(database: Database, count: int) -> Figures:
    """Seconds of all coroutines, and CPU seconds of their process."""
    database.clear()
    database.fill(count, "bench.pause", queue=PAUSES)
    database.settle()
    due = database.ids()
    with Worker(database, "--until-empty", expected=count) as worker:
        seen = worker.wait()
    verify(database, due, seen.ids)
    return {OURS: (seen.seconds, seen.cpu_seconds)}


def _peer_waits(peer: Driven, count: int) -> Figures:
    peer.clear()
    _, due = peer.bulk(count)
    peer.settle()
    cost = peer.drain(due, 1, LIMIT, "sleep")
    return {peer.title: (count / cost.rate, count * (cost.python or 0.0))}


def _broadcasts(bench: Bench) -> list[Row]:
    """Measure what one subscriber, and five, add to a transaction with an ORM insert."""
    blocks = bench.size(40, 2)
    bench.database.clear()
    ways = {"without": place, "one": place_and_broadcast, "five": _place_and_fan_out}
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for block in range(blocks + 1):
        for way, function in ways.items():
            cost = _block(function)
            if block:
                costs[way].append(cost)
    connection.close()
    orders = BLOCK * (blocks + 1)
    check(bench.database.count(table="bench_order") == len(ways) * orders, "orders are missing")
    check(bench.database.count() == (1 + FAN) * orders, "copies are missing or doubled")
    without = 1e6 * median(seconds for seconds, _ in costs["without"])
    names = {"one": "fan-out, one subscriber", "five": "fan-out, five subscribers"}
    rows = []
    for (way, name), limit in zip(names.items(), (200, 300), strict=True):
        pairs = list(zip(costs[way], costs["without"], strict=True))
        added = median(1e6 * (one[0] - other[0]) for one, other in pairs)
        cpu = median(1e6 * (one[1] - other[1]) for one, other in pairs)
        note = "added to a transaction with one ORM insert; against: that transaction"
        row = limited(name, added, "us", at_most=limit, against=without, note=note)
        rows.append(replace(row, worker_us=cpu))
    return rows


def _place_and_fan_out() -> None:
    with transaction.atomic():
        order = Order.objects.create(customer="orm fan", quantity=1)
        broadcast("bench.fan", {**bare.PAYLOAD, "number": order.pk})


def _block(function: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of one call, and those of this process's CPU."""
    began, cpu = perf_counter(), process_time()
    for _ in range(BLOCK):
        function()
    return (perf_counter() - began) / BLOCK, (process_time() - cpu) / BLOCK


def _drains(bench: Bench) -> list[Row]:
    """Lists against one by one, and a thousand queues against one."""
    count = bench.size(50_000, 3_000)
    many = len(SPREAD)
    kinds = {
        "single": partial(bench.database.fill, count),
        "lists": partial(bench.database.fill, count, "bench.list"),
        "one": partial(bench.database.fill, count, "bench.spread", queue=SPREAD[0]),
        "many": partial(bench.database.fill, count, "bench.spread", queues=many),
    }
    costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for _ in bench.in_turn("real, drains"):
        for kind, fill in kinds.items():
            bench.database.clear()
            fill()
            bench.database.settle()
            costs[kind].append(cost_of(bench.database, count))
    note = f"{count:,} no-op messages; against: "
    return [
        costs_compared(
            "drain, batch=True", costs["lists"], costs["single"], at_least=1.0,
            note=f"{note}one by one",
        ),
        costs_compared(
            f"drain, {many:,} queues", costs["many"], costs["one"], at_least=0.9,
            note=f"{note}the same handler in one queue",
        ),
    ]  # fmt: skip


def _figures(bench: Bench) -> list[Row]:
    """Drains that last longer than a heartbeat, whose figures are written, and are not."""
    count = bench.size(600_000, 3_000)
    costs: dict[bool, list[Cost]] = {True: [], False: []}
    shares = []
    for _ in bench.in_turn("real, figures"):
        for figures, found in costs.items():
            seen = drained_with(bench.database, count, figures=figures)
            found.append(Cost(count / seen.seconds, seen.cpu_seconds / count))
            if figures:
                shares.append(100 * seen.figures_seconds / seen.seconds)
    note = f"{count:,} no-op messages"
    against = f"{note}; against: none are written"
    share = "seconds in which they are written, the last time included"
    return [
        costs_compared("drain, figures", costs[True], costs[False], note=against),
        limited("drain, figures, share of the time", median(shares), "%", at_most=1, note=share),
    ]


def drained_with(database: Database, count: int, *, figures: bool) -> Seen:
    """Drain no-op messages; the figures of the heartbeat are written, or are not."""
    database.clear()
    database.fill(count)
    database.settle()
    return drained(database, count, recording={"figures": figures})
