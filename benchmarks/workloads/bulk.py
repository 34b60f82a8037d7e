"""broadcast_many() of many messages, against COPY of ready-made rows into the same table.

The Message objects are made beforehand, as the rows of COPY are; encoding, checks and routing
count. Both times include the COMMIT.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

from django.db import transaction

from benchmarks import bare
from benchmarks.app.handlers import QUEUE
from benchmarks.database import check
from benchmarks.report import Row, compared
from benchmarks.workloads import Bench
from django_mq import Message, broadcast_many

COPY = """
copy django_mq_queuedmessage (queue, type, payload, handler, metadata) from stdin
"""


def run(bench: Bench) -> list[Row]:
    """A list of messages (with ids returned), COPY, an iterator of messages, in turn."""
    count = bench.size(50_000, 5_000)
    messages = [Message("bench.noop", {**bare.PAYLOAD, "number": n}) for n in range(count)]
    rows = [
        (QUEUE, "bench.noop", json.dumps(message.payload), "bench.noop", "{}")
        for message in messages
    ]
    listed, copied, streamed = [], [], []
    for _ in bench.in_turn("bulk"):
        listed.append(_listed_rate(bench, messages))
        copied.append(_copied_rate(bench, rows))
        streamed.append(_streamed_rate(bench, messages))
    return [
        compared("bulk", listed, copied, at_least=0.6, note=f"{count:,} messages in a list"),
        compared("bulk, iterator", streamed, copied, at_least=0.6, note="constant memory"),
    ]


def _listed_rate(bench: Bench, messages: list[Message]) -> float:
    _prepare(bench)
    began = perf_counter()
    with transaction.atomic():
        receipts = broadcast_many(messages)
    seconds = perf_counter() - began
    stored = dict(
        bench.database.execute("select id, (payload->>'number')::int from django_mq_queuedmessage")
    )
    check(len(stored) == len(messages), "messages are missing")
    told = {
        receipt.ids[0]: message.payload["number"]
        for receipt, message in zip(receipts, messages, strict=True)
    }
    check(stored == told, "the receipts do not tell what was stored")
    return len(messages) / seconds


def _streamed_rate(bench: Bench, messages: list[Message]) -> float:
    _prepare(bench)
    began = perf_counter()
    with transaction.atomic():
        receipt = broadcast_many(iter(messages))
    seconds = perf_counter() - began
    check(receipt.count == len(messages) == bench.database.count(), "messages are missing")
    return len(messages) / seconds


def _copied_rate(bench: Bench, rows: list[tuple[Any, ...]]) -> float:
    _prepare(bench)
    done = bare.copy(bench.database.params(), COPY, rows)
    check(bench.database.count() == len(rows), "rows are missing")
    return len(rows) / (done.end - done.begin)


def _prepare(bench: Bench) -> None:
    bench.database.clear()
    bench.database.settle()
