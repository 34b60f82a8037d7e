"""Draining messages with order keys, of an ordered queue, with unique ids, that expire,
and into a history.

Each against the drain of messages without, by the same worker with default settings.
"""

from __future__ import annotations

from typing import Any

from benchmarks.app.handlers import QUEUE
from benchmarks.database import Database
from benchmarks.footprints import Cost, costs_compared
from benchmarks.report import Row
from benchmarks.workers import cost_of
from benchmarks.workloads import Bench

#: Name of the row, what the messages are, and settings of the worker.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "20 keys": ({"keys": 20}, {}),
    "1,000 keys": ({"keys": 1000}, {}),
    "one key": ({"keys": 1}, {}),
    "a key for each": ({"keys": 1_000_000_000}, {}),
    "ordered queue": ({"ordered": True}, {"QUEUES": {QUEUE: {"ordered": True}}}),
    "unique ids": ({"unique": True}, {}),
    "expires": ({"expires": True}, {}),
    "history": ({}, {"QUEUES": {QUEUE: {"history": 86400}}}),
    "history with payloads": (
        {},
        {"QUEUES": {QUEUE: {"history": 86400, "history_payload": True}}},
    ),
}
#: Of the rate of plain messages.
TARGETS = {
    "20 keys": 0.4,
    "1,000 keys": 0.4,
    "one key": 0.4,
    "ordered queue": 0.5,
    "unique ids": 0.6,
}


def run(bench: Bench) -> list[Row]:
    """Every kind and the plain drain, in turn."""
    count = bench.size(50_000, 3_000)
    plain: list[Cost] = []
    costs: dict[str, list[Cost]] = {name: [] for name in KINDS}
    for _ in bench.in_turn("lines"):
        plain.append(cost(bench.database, count, {}, {}))
        for name, (kind, settings) in KINDS.items():
            costs[name].append(cost(bench.database, count, kind, settings))
    note = f"{count:,} messages; against: plain ones"
    return [
        costs_compared(f"drain, {name}", costs[name], plain, at_least=TARGETS.get(name), note=note)
        for name in KINDS
    ]


def cost(database: Database, count: int, kind: dict[str, Any], settings: dict[str, Any]) -> Cost:
    """Return what a message costs one worker process."""
    database.clear()
    database.fill(count, **kind)
    database.settle()
    return cost_of(database, count, **settings)
