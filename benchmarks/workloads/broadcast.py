"""One broadcast in a transaction with one business insert, against that transaction without it.

In one process and on one connection, in short blocks that take turns, so that both see the same
machine. The first block of each is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import psycopg
from django.db import transaction

from benchmarks import bare
from benchmarks.app.models import Order
from benchmarks.database import check
from benchmarks.report import Row, compared
from benchmarks.workloads import Bench
from django_mq import broadcast

BLOCK = 250
INSERT = "insert into bench_order (customer, quantity, note, placed_at) values (%s, 1, '', now())"
STORE = f"insert into {bare.TABLE} (payload) values (%s::jsonb)"  # noqa: S608


def run(bench: Bench) -> list[Row]:
    """The rate with a broadcast and without, and the same of the bare driver as a ceiling."""
    blocks = bench.size(40, 4)
    database = bench.database
    database.clear()
    ours, without, bare_both, bare_one = [], [], [], []
    with database.connect(autocommit=False) as connection:
        for block in range(blocks + 1):
            rates = [_rate(place_and_broadcast), _rate(place)]
            rates += [_rate(_bare_both, connection), _rate(_bare_one, connection)]
            if block:
                for figures, rate in zip((ours, without, bare_both, bare_one), rates, strict=True):
                    figures.append(rate)
    messages = BLOCK * (blocks + 1)
    check(database.count() == messages, "broadcasts are missing or doubled")
    check(database.count(table="bench_order") == 4 * messages, "orders are missing or doubled")
    alone = database.execute(
        "select count(*) from bench_order o where customer = 'both' and 1 <> (select count(*)"
        " from django_mq_queuedmessage m where (m.payload->>'number')::bigint = o.id)"
    )
    check(alone == [(0,)], "an order has not exactly one message")
    note = "transactions with one ORM insert; against: without broadcast()"
    ceiling = "the driver alone, two inserts against one"
    return [
        compared("broadcast", ours, without, unit="tx/s", at_least=0.7, note=note),
        compared("broadcast, bare ceiling", bare_both, bare_one, unit="tx/s", note=ceiling),
    ]


def place_and_broadcast() -> None:
    """One business insert and one broadcast."""
    with transaction.atomic():
        order = Order.objects.create(customer="both", quantity=1)
        broadcast("bench.noop", {**bare.PAYLOAD, "number": order.pk})


def place() -> None:
    """One business insert."""
    with transaction.atomic():
        Order.objects.create(customer="one", quantity=1)


def _bare_both(connection: psycopg.Connection[Any]) -> None:
    connection.execute(INSERT, ("bare",))
    connection.execute(STORE, (bare.PAYLOAD_TEXT,))
    connection.commit()


def _bare_one(connection: psycopg.Connection[Any]) -> None:
    connection.execute(INSERT, ("bare",))
    connection.commit()


def _rate(function: Callable[..., None], *arguments: Any) -> float:
    began = perf_counter()
    for _ in range(BLOCK):
        function(*arguments)
    return BLOCK / (perf_counter() - began)
