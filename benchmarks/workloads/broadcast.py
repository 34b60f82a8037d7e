"""One broadcast in a transaction with one business insert, against that transaction without it.

Once with an insert by the ORM, once with prepared statements, and once by a plain cursor of
Django's, which is also measured against the bare driver that inserts both rows. All in one process,
on one connection each, in short blocks that take turns, so that they see the same machine. The
first block of each is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import psycopg
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction

from benchmarks import bare
from benchmarks.app.models import Order
from benchmarks.database import check
from benchmarks.report import Row, compared
from benchmarks.workloads import Bench
from django_mq import broadcast

BLOCK = 250
#: The alias whose connection prepares statements that it runs again, as docs/scaling.md shows.
PREPARED = "prepared"
PREPARES = {"server_side_binding": True, "prepare_threshold": 5}
INSERT = """
insert into bench_order (customer, quantity, note, placed_at) values (%s, 1, '', now())
returning id
"""
STORE = f"insert into {bare.TABLE} (payload) values (%s::jsonb)"

# Orders with another number of messages than one, and messages without an order.
NOT_ONE = """
select count(*)
  from (select id from bench_order where customer in ('orm both', 'prepared both', 'cursor both')) o
  full join (
       select (payload->>'number')::bigint as id, count(*) as messages
         from django_mq_queuedmessage group by 1) m using (id)
 where o.id is null or m.messages is distinct from 1
"""


def run(bench: Bench) -> list[Row]:
    """The rates with a broadcast and without, and the same of the bare driver."""
    blocks = bench.size(40, 4)
    database = bench.database
    database.clear()
    defaults = connections.settings[DEFAULT_DB_ALIAS]
    connections.settings[PREPARED] = {**defaults, "OPTIONS": {**defaults["OPTIONS"], **PREPARES}}
    with database.connect(autocommit=False) as bare_connection:
        ways: dict[str, Callable[[], None]] = {
            "orm both": place_and_broadcast,
            "orm": place,
            "prepared both": partial(place_and_broadcast, "prepared both", using=PREPARED),
            "cursor both": insert_and_broadcast,
            "cursor": insert,
            "bare both": lambda: _bare_both(bare_connection),
            "bare": lambda: _bare_one(bare_connection),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for block in range(blocks + 1):
            for way, function in ways.items():
                rate = _rate(function)
                if block:
                    rates[way].append(rate)
    connections[PREPARED].close()
    del connections[PREPARED], connections.settings[PREPARED]
    orders = BLOCK * (blocks + 1)
    check(database.count(table="bench_order") == len(ways) * orders, "orders are missing")
    check(database.count() == 3 * orders, "broadcasts are missing or doubled")
    check(database.execute(NOT_ONE) == [(0,)], "an order has not exactly one message")

    def row(workload: str, ours: str, other: str, note: str, at_least: float | None = None) -> Row:
        return compared(
            workload, rates[ours], rates[other], unit="tx/s", at_least=at_least, note=note
        )

    without = "against: without broadcast()"
    return [
        row("broadcast", "orm both", "orm", f"transactions with one ORM insert; {without}", 0.8),
        row("broadcast, prepared", "prepared both", "orm both", "against: statements sent as text"),
        row("broadcast, plain cursor", "cursor both", "cursor", f"an insert by SQL; {without}"),
        row("broadcast, two bare inserts", "cursor both", "bare both", "against: the driver alone"),
        row("broadcast, bare ceiling", "bare both", "bare", "the driver alone, two against one"),
    ]


def place_and_broadcast(customer: str = "orm both", using: str = DEFAULT_DB_ALIAS) -> None:
    """One business insert and one broadcast."""
    with transaction.atomic(using=using):
        order = Order.objects.using(using).create(customer=customer, quantity=1)
        broadcast("bench.noop", {**bare.PAYLOAD, "number": order.pk}, using=using)


def place() -> None:
    """One business insert."""
    with transaction.atomic():
        Order.objects.create(customer="orm", quantity=1)


def insert_and_broadcast() -> None:
    """One business insert by SQL and one broadcast."""
    with transaction.atomic():
        id = insert_order("cursor both")
        broadcast("bench.noop", {**bare.PAYLOAD, "number": id})


def insert() -> None:
    """One business insert by SQL."""
    with transaction.atomic():
        insert_order("cursor")


def insert_order(customer: str) -> int:
    """Insert one order by SQL; return its id."""
    with connection.cursor() as cursor:
        cursor.execute(INSERT, (customer,))
        (id,) = cursor.fetchone()
        return int(id)


def _bare_both(driver: psycopg.Connection[Any]) -> None:
    driver.execute(INSERT, ("bare both",))
    driver.execute(STORE, (bare.PAYLOAD_TEXT,))
    driver.commit()


def _bare_one(driver: psycopg.Connection[Any]) -> None:
    driver.execute(INSERT, ("bare",))
    driver.commit()


def _rate(function: Callable[[], None]) -> float:
    began = perf_counter()
    for _ in range(BLOCK):
        function()
    return BLOCK / (perf_counter() - began)
