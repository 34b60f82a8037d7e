"""Handlers of every kind keep a line in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from typing import Any

import pytest

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt
from tests.rows import add_all, insert_all, pks
from tests.slow import mostly_slow, slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start
from tests.worker.lines.conftest import AT_ONCE, Log, empty, keyed, row

pytestmark = pytest.mark.django_db(transaction=True)


# ---- ordered queues


def test_handlers_of_every_kind_share_a_line(start: Start, log: Log) -> None:
    """They run in order of ids: a thread, the loop and a batch wait for each other."""

    def run(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    @handler("a.atomic", queue="line", name="atomic")
    def atomic(delivery: Delivery) -> None:
        run(delivery)

    @handler("a.unbound", queue="line", name="unbound", atomic=False)
    def nonatomic(delivery: Any) -> None:
        with delivery.finish():
            run(delivery)

    @handler("a.coroutine", queue="line", name="coroutine")
    async def coroutine(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            await asyncio.sleep(0.001)

    @handler("a.batch", queue="line", name="batch", batch=True)
    def batch(deliveries: list[Delivery]) -> None:
        with log.running("line", *(each.id for each in deliveries)):
            pass

    dice = random.Random(3)
    names = [dice.choice(("atomic", "unbound", "coroutine", "batch")) for _ in range(60)]
    messages = [row(handler=name, type=f"a.{name}") for name in names]
    start(threads=3)
    log.wait(60)
    assert log.order == pks(*messages)
    assert log.overlaps == []


@pytest.mark.parametrize("kinds", ["aca", "caacac"])
def test_messages_taken_over_keep_the_order_of_their_line(
    start: Start, log: Log, kinds: str
) -> None:
    """Messages of a worker that is gone go before all others, threads and the loop in turns."""

    @handler("a.atomic", queue="line", name="atomic")
    def atomic(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            pass

    @handler("a.coroutine", queue="line", name="coroutine")
    async def coroutine(delivery: Delivery) -> None:
        with log.running("line", delivery.id):
            await asyncio.sleep(0.001)

    names = ["atomic" if kind == "a" else "coroutine" for kind in kinds]
    lapsed = [row(handler=name, type=f"a.{name}", attempts=1, leased=-1) for name in names]
    waiting = [row(handler=name, type=f"a.{name}") for name in names]
    start(threads=3)
    log.wait(2 * len(kinds))
    assert log.order == pks(*lapsed, *waiting)
    assert log.overlaps == []


def test_an_unrouted_message_of_a_line_is_split_into_it(start: Start, log: Log) -> None:
    """The first handler gets it in its place, the others at the end."""
    for name in ("one", "two"):

        @handler("a.b", queue="line", name=name)
        def function(delivery: Delivery) -> None:
            with log.running("line", delivery.id):
                pass

    first = row(handler="", type="a.b")
    second = row(handler="one", type="a.b")
    start(until_empty=True).join()
    assert log.order[:2] == pks(first, second)
    assert len(log.order) == 3
    assert log.overlaps == []


# ---- keys


KINDS: dict[str, dict[str, Any]] = {
    "atomic": {},
    "unbound": {"atomic": False},
    "finish": {"atomic": False},
    "batch": {"batch": True},
    "coroutine": {},
    "afinish": {},
}


@pytest.mark.parametrize(("kind", "slots"), mostly_slow([*KINDS], [100, 2]))
def test_every_kind_of_handler_keeps_keys_in_order(
    start: Start, log: Log, kind: str, slots: int
) -> None:
    """Guarantee 8, KAF-5: a quarter of the messages fails at first, in three threads and a loop.

    A failed batch is retried by its policy, message by message.
    """

    def fail(delivery: Delivery) -> None:
        if delivery.id % 4 == 0 and delivery.attempt == 1:
            raise ValueError

    options: dict[str, Any] = {**KINDS[kind], "queue": "mail", "name": "h", "retry": AT_ONCE}
    if kind == "batch":

        @handler("#", **options)
        def batch(deliveries: list[Delivery]) -> None:
            with contextlib.ExitStack() as stack:
                for each in {each.key for each in deliveries}:
                    ids = [one.id for one in deliveries if one.key == each]
                    stack.enter_context(log.running(str(each), *ids))
                for one in deliveries:
                    fail(one)

    elif kind in ("coroutine", "afinish"):

        @handler("#", **options)
        async def coroutine(delivery: Any) -> None:
            with log.running(delivery.key, delivery.id):
                await asyncio.sleep(0.001)
                fail(delivery)
                if kind == "afinish":
                    await delivery.afinish(lambda: None)

    else:

        @handler("#", **options)
        def plain(delivery: Any) -> None:
            with log.running(delivery.key, delivery.id):
                fail(delivery)
                if kind == "finish":
                    with delivery.finish():
                        pass

    expected: dict[str, list[int]] = defaultdict(list)
    for message in add_all({"handler": "h", "key": f"k{n % 5}"} for n in range(60)):
        expected[str(message.key)].append(message.pk)
    start(threads=3, async_slots=slots)
    until(empty, f"not all are done: {log.done}")
    # A message that finishes itself is deleted before its handler ends.
    until(lambda: sum(map(len, log.done.values())) == 60, f"not all have ended: {log.done}")
    assert log.done == expected
    assert log.overlaps == []
    assert FailedAttempt.objects.count() == 15


def test_coroutines_of_different_keys_run_at_once(start: Start) -> None:
    """Each waits for all the others: one after another they would never end."""
    arrived: set[str | None] = set()
    everybody: asyncio.Event | None = None

    @handler("#", queue="mail", name="h", timeout=PATIENCE)
    async def h(delivery: Delivery) -> None:
        nonlocal everybody
        everybody = everybody or asyncio.Event()
        arrived.add(delivery.key)
        if len(arrived) == 10:
            everybody.set()
        await everybody.wait()

    for n in range(30):
        keyed(f"k{n % 10}")
    start(until_empty=True).join()
    assert empty()
    assert not FailedAttempt.objects.exists()


@pytest.mark.parametrize("slots", [3, *slow(1)])
def test_keys_never_take_more_slots_than_there_are(start: Start, log: Log, slots: int) -> None:
    """NSQ-23: a message that waits for its key will need a slot, too."""

    @handler("#", queue="mail", name="h")
    async def h(delivery: Delivery) -> None:
        with log.running(str(delivery.key), delivery.id):
            await asyncio.sleep(0)

    keys = (key for n in range(60) for key in (f"k{n % 7}", None))
    insert_all({"handler": "h", "key": key} for key in keys)
    start(async_slots=slots)
    until(empty, "all are done")
    assert log.most <= slots
    assert len(log.order) == 120
    assert all(ids == sorted(ids) for key, ids in log.done.items() if key != "None")
