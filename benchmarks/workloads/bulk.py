"""broadcast_many() of many messages, against COPY of rows into the same table.

The clock includes what a user waits for: payloads and Message objects are built while it runs, and
so are the payloads, their JSON and the tuples of COPY. Both times include the COMMIT.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    listed, copied, streamed = [], [], []
    for _ in bench.in_turn("bulk"):
        listed.append(_listed_rate(bench, count))
        copied.append(_copied_rate(bench, count))
        streamed.append(_streamed_rate(bench, count))
    note = "built within the clock"
    return [
        compared("bulk", listed, copied, at_least=0.6, note=f"{count:,} in a list, {note}"),
        compared("bulk, iterator", streamed, copied, at_least=0.6, note=f"constant memory, {note}"),
    ]


def _messages(count: int) -> Iterator[Message]:
    return (Message("bench.noop", {**bare.PAYLOAD, "number": n}) for n in range(count))


def _rows(count: int) -> Iterator[tuple[Any, ...]]:
    for number in range(count):
        payload = json.dumps({**bare.PAYLOAD, "number": number})
        yield QUEUE, "bench.noop", payload, "bench.noop", "{}"


def _listed_rate(bench: Bench, count: int) -> float:
    _prepare(bench)
    began = perf_counter()
    with transaction.atomic():
        messages = list(_messages(count))
        receipts = broadcast_many(messages)
    seconds = perf_counter() - began
    stored = dict(
        bench.database.execute("select id, (payload->>'number')::int from django_mq_queuedmessage")
    )
    check(len(stored) == count, "messages are missing")
    told = {
        receipt.ids[0]: message.payload["number"]
        for receipt, message in zip(receipts, messages, strict=True)
    }
    check(stored == told, "the receipts do not tell what was stored")
    return count / seconds


def _streamed_rate(bench: Bench, count: int) -> float:
    _prepare(bench)
    began = perf_counter()
    with transaction.atomic():
        receipt = broadcast_many(_messages(count))
    seconds = perf_counter() - began
    check(receipt.count == count == bench.database.count(), "messages are missing")
    return count / seconds


def _copied_rate(bench: Bench, count: int) -> float:
    _prepare(bench)
    done = bare.copy(bench.database.params(), COPY, _rows(count))
    check(bench.database.count() == count, "rows are missing")
    return count / (done.end - done.begin)


def _prepare(bench: Bench) -> None:
    bench.database.clear()
    bench.database.settle()
