"""The helpers in an `async` test: those that need a thread say how to get one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from django_mq import handler
from django_mq.testing import assert_broadcast, capture_broadcasts, deliver, drain, due
from tests.rows import add

pytestmark = pytest.mark.django_db


def plain(delivery: Any) -> Any:
    return delivery.payload


async def coroutine(delivery: Any) -> Any:
    return delivery.payload


@pytest.fixture(autouse=True)
def _handlers(_own_handlers: None) -> None:
    for function in (plain, coroutine):
        handler("a.b", queue="mail", name=function.__name__)(function)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("drain", drain),
        ("due", due),
        ("deliver", lambda: deliver(plain, 1)),
        ("deliver", lambda: deliver(coroutine, 1)),
        ("assert_broadcast", lambda: assert_broadcast("a.b")),
    ],
)
def test_on_a_loop_they_name_the_way(name: str, call: Callable[[], Any]) -> None:
    async def test() -> None:
        call()

    with pytest.raises(SynchronousOnlyOperation, match=re.escape(f"await sync_to_async({name})(")):
        asyncio.run(test())


@pytest.mark.parametrize("function", [plain, coroutine])
def test_in_a_thread_they_work(function: Any) -> None:
    add(handler=function.__name__, type="a.b")

    async def test() -> None:
        assert await sync_to_async(drain)() == 1
        assert await sync_to_async(due)() == 0
        assert await sync_to_async(deliver)(function, 1) == 1

    async_to_sync(test)()


def test_captured_broadcasts_are_asserted_on_a_loop() -> None:
    async def test() -> None:
        with capture_broadcasts():
            assert_broadcast("a.b", times=0)

    asyncio.run(test())
