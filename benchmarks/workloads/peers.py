"""django_mq, the bare driver and other queues on PostgreSQL, one after the other in each round.

Each peer has a database and an environment of its own, and is tuned as its manual says
(`benchmarks/peers/README.md`). A peer that cannot be installed here has a row that says why; one
that loses or doubles a job has WRONG in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.database import Wrong, copied
from benchmarks.peers import ours
from benchmarks.peers.board import Board
from benchmarks.peers.catalog import PEERS, Peer
from benchmarks.peers.driving import Driven
from benchmarks.peers.environments import Absent, command
from benchmarks.peers.ours import BARE, OURS, Figures
from benchmarks.report import Row, failed, percentile
from benchmarks.workloads import Bench

ENQUEUE = "enqueue one per transaction"
BULK = "bulk"
DRAIN = {1: "drain, 1 process", 2: "drain, 2 processes"}
MEDIAN, LAST = "start after commit, median", "start after commit, 99th percentile"

#: Seconds after which a peer's drain is stopped; its rate is that of what was done until then.
LIMIT = 15.0
#: Seconds between two messages of the latency, and how many are not counted at its start.
EVERY, WARM_UP = 0.1, 5


def run(bench: Bench) -> list[Row]:
    """Everybody in every round."""
    board = Board(BARE)
    with ExitStack() as stack:
        bench.database.clear()
        peers, absent = installed(bench, stack, PEERS, "peers")
        for _ in bench.in_turn("peers"):
            _round(bench, board, peers)
    others = [peer.title for peer in peers]
    _say_how_many(bench, board, peers)
    rows: list[Row] = []
    for what in (ENQUEUE, BULK, *DRAIN.values()):
        target = 1.0 if what in (ENQUEUE, DRAIN[1]) else None
        rows += board.rates(what, OURS, others, at_least=target)
    rows += board.times(MEDIAN, OURS, others)
    rows += board.times(LAST, OURS, others, at_most=1.0)
    return [*rows, *absent]


def installed(
    bench: Bench, stack: ExitStack, peers: Sequence[Peer], prefix: str
) -> tuple[list[Driven], list[Row]]:
    """Install peers and make their databases; return those that are there, and the others."""
    found, absent = [], []
    for peer in peers:
        try:
            words = command(peer.name, peer.driver)
        except Absent as missing:
            note = f"not measured: {missing}"
            absent.append(Row(workload=f"{prefix}: {peer.title}", figure=0.0, unit="", note=note))
            continue
        database = stack.enter_context(copied(bench.database, peer.name[:8]))
        driven = Driven(peer, words, database)
        try:
            driven.run("schema")
        except Wrong as wrong:
            absent.append(failed(f"{prefix}: {peer.title}", str(wrong)))
            continue
        found.append(driven)
    return found, absent


def _round(bench: Bench, board: Board, peers: list[Driven]) -> None:
    transactions, warm_up = bench.size(2_000, 150), bench.size(300, 50)
    waits = bench.size(100, 20)

    board.measure((ENQUEUE,), OURS, ours.enqueued, bench, transactions, warm_up)
    for peer in peers:
        board.measure((ENQUEUE,), peer.title, _enqueued, peer, transactions, warm_up)

    board.measure((BULK,), OURS, ours.stored_at_once, bench)
    for processes, what in DRAIN.items():
        count = processes * job_count(bench)
        board.measure((what,), OURS, ours.drained_by, bench.database, count, processes)
        for peer in peers:
            whats = (what, BULK) if processes == 1 else (what,)
            board.measure(whats, peer.title, drained, bench, peer, processes)

    board.measure((MEDIAN, LAST), OURS, ours.waited, bench)
    for peer in peers:
        board.measure((MEDIAN, LAST), peer.title, _waited, peer, waits)


def _enqueued(peer: Driven, count: int, warm_up: int) -> Figures:
    return {peer.title: (peer.enqueue(count, warm_up),)}


def drained(bench: Bench, peer: Driven, processes: int) -> Figures:
    """The rates of the drain, and of the enqueuing before."""
    peer.clear()
    peer.settle()
    bulk, due = peer.bulk(processes * job_count(bench, peer))
    peer.settle()
    return {peer.title: (peer.drain(due, processes, LIMIT), bulk)}


def _waited(peer: Driven, count: int) -> Figures:
    waits = peer.waits(count, EVERY, WARM_UP)
    return {peer.title: (percentile(waits, 0.5), percentile(waits, 0.99))}


def _say_how_many(bench: Bench, board: Board, peers: list[Driven]) -> None:
    for peer in peers:
        count = job_count(bench, peer)
        board.note(BULK, peer.title, f"{count:,} jobs")
        for processes, what in DRAIN.items():
            board.note(what, peer.title, f"{processes * count:,} jobs or {LIMIT:g} s")


def job_count(bench: Bench, peer: Driven | None = None) -> int:
    """Return how many jobs one process drains."""
    if peer and peer.slow:
        return bench.size(3_000, 200)
    return bench.size(50_000, 3_000)
