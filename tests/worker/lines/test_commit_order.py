"""Keys run in the order of broadcasts and commits, in drain() too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from django_mq import Message, broadcast, broadcast_many, handler
from django_mq.messages import Delivery
from django_mq.testing import drain, due
from tests.slow import slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start
from tests.worker.lines.conftest import LATER, Log, empty

pytestmark = pytest.mark.django_db(transaction=True)


# ---- keys


@pytest.mark.parametrize("count", [1, 200, *slow(20)])
def test_bulk_keeps_the_order_of_a_list(start: Start, log: Log, count: int) -> None:
    """One statement or COPY: ids rise in the order of the list."""

    @handler("a.b", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        with log.running(str(delivery.key), delivery.payload):
            pass

    with transaction.atomic():
        broadcast_many([Message("a.b", n, key=f"k{n % 3}") for n in range(count)])
        broadcast_many(Message("a.b", n, key=f"k{n % 3}") for n in range(count, 2 * count))
    start(threads=2)
    until(empty, "all are done")
    assert all(numbers == sorted(numbers) for numbers in log.done.values())
    assert len(log.order) == 2 * count


def test_commit_order_from_two_producers(start: Start, log: Log) -> None:
    """`key_order`: the second to commit comes second, even if it wrote at the same time."""

    @handler("a.b", queue="commits", name="h")
    def h(delivery: Delivery) -> None:
        with log.running("k", delivery.payload):
            pass

    turn = threading.Lock()
    committed: list[int] = []

    def produce(first: int) -> None:
        try:
            for n in range(first, 40, 2):
                with transaction.atomic():
                    broadcast("a.b", n, key="k")
                    with turn:  # no other transaction holds the key: this is the order of commits
                        committed.append(n)
        finally:
            connections.close_all()

    start(threads=2)
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(produce, 0), pool.submit(produce, 1)]:
            call.result(PATIENCE)
    log.wait(40)
    assert log.order == committed


# ---- drain()


def test_drain_keeps_lines_in_order(log: Log) -> None:
    """It keeps them in users' tests like a worker; a waiting head stops its line there, too."""
    for queue in ("line", "mail"):

        @handler(f"{queue}.#", queue=queue, name=queue, retry=LATER)
        def function(delivery: Delivery) -> None:
            with log.running(delivery.queue, delivery.id):
                if delivery.payload == "fails" and delivery.attempt == 1:
                    raise ValueError

    with transaction.atomic():
        sent = {
            queue: [
                broadcast(
                    f"{queue}.x",
                    "fails" if n == 1 else {},
                    priority=n,
                    key="k" if queue == "mail" else None,
                ).ids[0]
                for n in range(4)
            ]
            for queue in ("line", "mail")
        }
    assert drain(errors="keep").deliveries == 4
    assert log.done == {queue: ids[:1] for queue, ids in sent.items()}
    due()
    drain()
    assert log.done == sent
