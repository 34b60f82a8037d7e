"""On_commit hooks: the origin of their broadcasts, and slow hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.utils import translation

from django_mq import broadcast, handler
from django_mq.executor.scoreboard import Entry
from django_mq.messages import Delivery, current_delivery
from django_mq.models import QueuedMessage
from tests.rows import add
from tests.worker.conftest import Bench, Start, effect, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


def rebroadcast(type: str = "out") -> None:
    with transaction.atomic():
        broadcast(type)


def origins() -> list[tuple[str, int]]:
    """Return the cause and the number of hops of each message that a hook has broadcast."""
    found = QueuedMessage.objects.filter(type="out").order_by("pk")
    return [(each.metadata["mq.causation_id"], each.metadata["mq.hops"]) for each in found]


@pytest.mark.parametrize("writes", [False, True], ids=["others", "users"])
def test_each_hook_of_a_slice_has_the_delivery_of_its_own_handler(
    bench: Bench, writes: bool
) -> None:
    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if writes:
            effect(delivery)
        transaction.on_commit(rebroadcast)

    added = [add(type="a", handler="h", metadata={"mq.hops": n}) for n in range(3)]
    bench.run_all(bench.claim())
    assert origins() == [(str(each.pk), n + 1) for n, each in enumerate(added)]
    assert current_delivery.get() is None


def test_the_hooks_of_a_list_have_its_first_delivery(bench: Bench) -> None:
    @handler("a", queue="mail", name="h", batch=True)
    def h(deliveries: list[Delivery]) -> None:
        transaction.on_commit(rebroadcast)

    added = [add(type="a", handler="h") for _ in range(3)]
    bench.run_all(bench.claim())
    assert origins() == [(str(added[0].pk), 1)]


def test_a_hook_leaves_nothing_in_the_context_of_the_next_one(bench: Bench) -> None:
    languages: list[str] = []

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        def hook() -> None:
            languages.append(translation.get_language())
            translation.activate("de")

        transaction.on_commit(hook)

    for _ in range(2):
        add(type="a", handler="h")
    bench.run_all(bench.claim())
    assert languages == [translation.get_language()] * 2


@pytest.mark.parametrize("answered", [True, False], ids=["committed", "without an answer"])
def test_the_whole_slice_is_settled_before_its_hooks_run(
    make_bench: Callable[..., Bench], proxy: Proxy, answered: bool
) -> None:
    """A hook that hangs does not keep the messages of handlers that wrote nothing."""
    bench = make_bench(port=proxy.port)
    found: list[set[int]] = []

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload == "writes":
            effect(delivery)
            transaction.on_commit(lambda: found.append(waiting()))

    added = [add(type="a", handler="h", payload=each) for each in ("nothing", "writes", "nothing")]
    tasks = bench.claim()
    if not answered:
        proxy.cut_at("COMMIT", arrives=True)
    bench.run_all(tasks)
    assert proxy.cuts == (not answered)
    assert found == [set()]
    assert sorted(bench.settled) == [each.pk for each in added]


@pytest.mark.parametrize("batch", [False, True])
def test_the_timeout_of_their_handler_holds_for_hooks(bench: Bench, batch: bool) -> None:
    """The supervisor ends the process of a hook that hangs; its message is already done."""
    found: list[Entry] = []

    @handler("a", queue="mail", name="h", timeout=7, batch=batch)
    def h(argument: Any) -> None:
        transaction.on_commit(lambda: found.extend(bench.scoreboard.read("bench")))

    added = [add(type="a", handler="h").pk for _ in range(2)]
    bench.run_all(bench.claim())
    assert [each.fence.id for each in found] == added[: 1 if batch else 2]
    assert [each.deadline - each.began for each in found] == pytest.approx([7.0] * len(found))
    assert bench.scoreboard.running() == []


def in_own_block(delivery: Any) -> None:
    with transaction.atomic():
        transaction.on_commit(rebroadcast)


def in_finish(delivery: Any) -> None:
    with delivery.finish():
        transaction.on_commit(rebroadcast)


async def in_afinish(delivery: Any) -> None:
    await delivery.afinish(transaction.on_commit, rebroadcast)


async def in_a_thread(delivery: Any) -> None:
    await sync_to_async(in_own_block)(delivery)


@pytest.mark.parametrize("run", [in_own_block, in_finish, in_afinish, in_a_thread])
def test_hooks_of_transactions_that_a_handler_opens_itself(start: Start, run: Any) -> None:
    atomic = None if run in (in_afinish, in_a_thread) else False
    handler("a", queue="mail", name="h", atomic=atomic)(run)
    added = [add(type="a", handler="h") for _ in range(2)]
    assert start(until_empty=True, queues=["mail"]).join()
    assert sorted(origins()) == sorted((str(each.pk), 1) for each in added)


def test_endless_broadcasts_of_hooks_are_stopped(
    start: Start, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_MQ = {"MAX_HOPS": 4}
    calls: list[int] = []

    @handler("a", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        calls.append(delivery.id)
        if len(calls) < 20:
            transaction.on_commit(lambda: rebroadcast("a"))

    add(type="a", handler="h")
    assert start(until_empty=True).join()
    assert len(calls) == 5
    assert [each.event for each in caplog.records if each.levelname == "ERROR"] == ["hook_failed"]
    assert "TooManyHops" in caplog.text
