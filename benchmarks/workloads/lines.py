"""Draining messages with order keys, of an ordered queue, with unique ids, that expire,
and into a history.

Each against the drain of messages without, by the same worker with default settings.
"""

from __future__ import annotations

from typing import Any

from benchmarks.app.handlers import QUEUE
from benchmarks.database import Database
from benchmarks.report import Row, compared
from benchmarks.workers import drained
from benchmarks.workloads import Bench

#: Name of the row, what the messages are, and settings of the worker.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "20 keys": ({"keys": 20}, {}),
    "1,000 keys": ({"keys": 1000}, {}),
    "one key": ({"keys": 1}, {}),
    "ordered queue": ({"ordered": True}, {"QUEUES": {QUEUE: {"ordered": True}}}),
    "unique ids": ({"unique": True}, {}),
    "each expires": ({"expires": True}, {}),
    "history": ({}, {"QUEUES": {QUEUE: {"history": 86400}}}),
    "history with payloads": (
        {},
        {"QUEUES": {QUEUE: {"history": 86400, "history_payload": True}}},
    ),
}


def run(bench: Bench) -> list[Row]:
    """Every kind and the plain drain, in turn."""
    count = bench.size(50_000, 3_000)
    plain: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in bench.in_turn("lines"):
        plain.append(rate(bench.database, count, {}, {}))
        for name, (kind, settings) in KINDS.items():
            rates[name].append(rate(bench.database, count, kind, settings))
    return [
        compared(f"drain, {name}", rates[name], plain, note=f"{count:,} against plain ones")
        for name in KINDS
    ]


def rate(database: Database, count: int, kind: dict[str, Any], settings: dict[str, Any]) -> float:
    """Return messages a second of one worker process."""
    database.clear()
    database.fill(count, **kind)
    database.settle()
    return count / drained(database, count, **settings).seconds
