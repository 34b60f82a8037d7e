"""Threads of async handlers in a test: connections of their own, and none that is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.test import TestCase

from django_mq import HandlerBrokeTransaction, handler
from django_mq.testing import deliver, drain
from testproject.shop.models import Product
from tests.executor.other_threads import LATER, Way, own_pid, turn_autocommit_off, ways
from tests.testing.drain.conftest import send

#: Runs the handler of `test.any`.
Run = Callable[[], Any]


def delivered() -> None:
    deliver("any")


def drained() -> None:
    send("test.any")
    drain()


def drained_by_async_test() -> None:
    """There the coroutines run on the loop of the test."""

    async def test() -> None:
        await sync_to_async(drained)()

    async_to_sync(test)()


runs = pytest.mark.parametrize("run", [delivered, drained, drained_by_async_test])


@pytest.mark.django_db
@ways
@runs
def test_no_session_is_left(run: Run, way: Way) -> None:
    """One that is left blocks the end of the tests, which drops their database."""
    drivers: list[Any] = []

    def connect() -> None:
        connection.ensure_connection()
        drivers.append(connection.connection)

    @handler("test.any", name="any", retry=LATER)
    async def any_(delivery: Any) -> None:
        await way(connect)

    run()
    assert drivers != [connection.connection]
    assert [driver.closed for driver in drivers] == [True]


@pytest.mark.django_db
@ways
@runs
def test_a_transaction_that_is_left_open(run: Run, way: Way) -> None:
    @handler("test.any", name="any", retry=LATER)
    async def any_(delivery: Any) -> None:
        await way(leave_open)

    def leave_open() -> None:
        turn_autocommit_off("default")
        connection.cursor().execute("select 1")

    with pytest.raises(HandlerBrokeTransaction, match="a blocking call of an async handler"):
        run()


@pytest.mark.django_db
def test_the_connection_of_the_test_stays_as_it_is() -> None:
    """Thread-sensitive calls run in the thread of the test."""

    @handler("test.any", name="any", retry=LATER)
    async def any_(delivery: Any) -> None:
        await asyncio.to_thread(own_pid)
        await Product.objects.acreate(name="written", price=1)

    with transaction.atomic():
        delivered()
        assert connection.in_atomic_block
        transaction.set_rollback(True)
    assert not Product.objects.filter(name="written").exists()
    drained()
    assert Product.objects.filter(name="written").exists()


class AsyncTest(TestCase):
    async def test_calls_of_the_test_itself_still_work(self) -> None:
        @handler("test.any", name="any", retry=LATER)
        async def any_(delivery: Any) -> None:
            assert await asyncio.to_thread(lambda: 2) == 2

        for _ in range(2):
            assert await asyncio.to_thread(lambda: 1) == 1
            await sync_to_async(drained)()
        assert await asyncio.to_thread(lambda: 3) == 3
