"""django_mq and its peers, each beside a crowd of delayed and failed jobs of its own.

Everybody in turn with itself without the crowd.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.database import copied
from benchmarks.peers import ours
from benchmarks.peers.board import Board
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.driving import Driven
from benchmarks.peers.ours import BARE, OURS, Figures
from benchmarks.report import Row
from benchmarks.workloads import Bench
from benchmarks.workloads.peers import LIMIT, drained, installed, job_count

BESIDE, BASE = "drain beside delayed and failed", "drain beside nothing"
DAY = 86_400.0


def run(bench: Bench) -> list[Row]:
    """Return the share of each one's own rate that is left beside its crowd."""
    board = Board(BARE)
    with ExitStack() as stack:
        bench.database.clear()
        peers, absent = installed(bench, stack, PEERS, "peers")
        _ours_beside(bench, board)
        for peer in peers:
            _peer_beside(bench, board, peer)
    note = f"beside {_crowd(bench):,} of each; against: without them"
    for title in (OURS, BARE):
        board.note(BESIDE, title, note)
    for peer in peers:
        board.note(BESIDE, peer.title, f"{job_count(bench, peer):,} jobs or {LIMIT:g} s; {note}")
    titles = (OURS, BARE, *(peer.title for peer in peers))
    return [*(board.shares(BESIDE, BASE, title) for title in titles), *absent]


def _ours_beside(bench: Bench, board: Board) -> None:
    beside = _crowd(bench)
    with copied(bench.database, "beside") as crowded:
        for priority in (0, 5):
            crowded.fill(beside // 2, priority=priority, after=DAY)
        crowded.fill(beside, dead=True)
        for _ in bench.in_turn(f"peers, beside, {OURS}"):
            board.measure((BESIDE,), OURS, ours.drained_beside, crowded, job_count(bench))
            board.measure((BASE,), OURS, ours.drained_by, bench.database, job_count(bench))


def _peer_beside(bench: Bench, board: Board, peer: Driven) -> None:
    with copied(bench.database, "beside") as database:
        crowded = peer.on(database)
        board.measure((BESIDE,), peer.title, _crowded, crowded, _crowd(bench))
        for _ in bench.in_turn(f"peers, beside, {peer.title}"):
            board.measure((BESIDE,), peer.title, _drained_beside, bench, crowded)
            board.measure((BASE,), peer.title, drained, bench, peer, 1)


def _crowded(crowded: Driven, count: int) -> Figures:
    crowded.run("schema")
    crowded.crowd(count)
    return {}


def _drained_beside(bench: Bench, crowded: Driven) -> Figures:
    crowded.purge()
    _, due = crowded.bulk(job_count(bench, crowded))
    crowded.settle()
    return {crowded.title: (crowded.drain(due, 1, LIMIT),)}


def _crowd(bench: Bench) -> int:
    return bench.size(1_000_000, 20_000)
