"""docs/guides/async.md: clients, views that ask, and tests, on real loops and connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction
from django.test import RequestFactory

from django_mq import RetryPolicy, arequest, broadcast, fixed, handler
from django_mq.models import QueuedMessage
from django_mq.testing import answering, drain
from django_mq.worker import Worker
from testproject.shop.models import Order, Product
from tests.docs.pages import namespace, story
from tests.worker.conftest import PATIENCE, Running

pytestmark = pytest.mark.django_db(transaction=True)


class AsyncClient:
    """The relevant part of httpx 0.28: bound to the loop on which it is used first."""

    made: list[AsyncClient]

    def __init__(self, timeout: float) -> None:
        self.calls: list[Any] = []
        self.loop = asyncio.get_running_loop()
        self.closed_on: asyncio.AbstractEventLoop | None = None
        self.made.append(self)

    async def post(self, url: str, **options: Any) -> SimpleNamespace:
        assert asyncio.get_running_loop() is self.loop
        self.calls.append((url, options))
        return SimpleNamespace(raise_for_status=lambda: None)

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed_on = asyncio.get_running_loop()


@pytest.fixture
def gate() -> Event:
    """The handler of quotes waits for it."""
    gate = Event()
    gate.set()
    return gate


@pytest.fixture
def page(gate: Event) -> Iterator[Any]:
    AsyncClient.made = []
    with story("guides/async.md", {"httpx": namespace("httpx", AsyncClient=AsyncClient)}) as page:

        @handler("shop.quotes.wanted", queue="quotes", retry=RetryPolicy(backoff=fixed(0.1)))
        def price(delivery: Any) -> int:
            if delivery.payload.get("fails") and delivery.attempt == 1:
                raise ZeroDivisionError
            assert gate.wait(PATIENCE)
            return 20

        yield page


@pytest.fixture
def product() -> Product:
    return Product.objects.create(name="chair", price=20, stock=9)


@pytest.fixture
def order(product: Product) -> Order:
    return Order(product=product, price=20, quantity=1, email="ada@example.com")


def tell(type: str, payload: Any, count: int = 1) -> None:
    with transaction.atomic():
        for _ in range(count):
            broadcast(type, payload)


def test_a_view_broadcasts_in_its_transaction(page: Any, product: Product) -> None:
    response = async_to_sync(page.buy)(RequestFactory().post("/"), product.pk)
    order = Order.objects.get()
    assert json.loads(response.content) == {"order": order.pk}
    assert QueuedMessage.objects.get().payload == {"order_id": order.pk}


def test_one_client_per_worker_closed_on_its_loop(page: Any, order: Order) -> None:
    order.save()
    tell("shop.orders.placed", {"order_id": order.pk}, 5)
    assert Worker().run(until_empty=True)
    [client] = AsyncClient.made
    assert len(client.calls) == 5
    assert client.closed_on is client.loop
    order.refresh_from_db()
    assert order.status == Order.Status.PACKED


def test_a_loop_for_each_handler_in_a_test(page: Any) -> None:
    tell("shop.stock.changed", {"shops": ["a.example", "b.example"], "left": 3}, 2)
    assert drain() == 2
    first, second = AsyncClient.made
    assert first.loop is not second.loop
    assert [url for url, _ in first.calls] == ["https://a.example/stock", "https://b.example/stock"]
    assert all(each.closed_on is each.loop for each in (first, second))


def test_a_view_that_waits_has_no_connection(page: Any, gate: Event) -> None:
    gate.clear()

    async def scenario() -> Any:
        view = asyncio.create_task(page.quote(RequestFactory().get("/"), 7))
        async with asyncio.timeout(PATIENCE):
            while await sync_to_async(lambda: connections["default"].connection)() is not None:
                await asyncio.sleep(0.01)
        gate.set()
        return await view

    connections["default"].ensure_connection()
    running = Running(Worker(), until_empty=False)
    try:
        assert json.loads(async_to_sync(scenario)().content) == {"price": 20}
    finally:
        gate.set()
        running.stop()


def test_server_sent_events(page: Any) -> None:
    """The handler fails at first, so that the wait ends without a reply."""

    async def scenario() -> list[str]:
        pending = await arequest("shop.quotes.wanted", {"fails": True})
        return [chunk async for chunk in page.events(pending)]

    with answering(errors="keep") as errors:
        first, *_, last = async_to_sync(scenario)()
    assert first == ": still waiting\n\n"
    assert last == "event: price\ndata: 20\n\n"
    assert [type(each) for each in errors] == [ZeroDivisionError]


@pytest.mark.parametrize("name", ["test_an_order_is_announced", "test_a_quote"])
def test_the_tests_of_the_page_pass(page: Any, order: Order, name: str) -> None:
    """As pytest-asyncio runs them: the database code is in another thread."""
    test = getattr(page, name)

    async def scenario() -> None:
        try:
            await (test(order) if name == "test_an_order_is_announced" else test())
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(scenario())
    assert not QueuedMessage.objects.filter(type="shop.orders.placed").exists()
