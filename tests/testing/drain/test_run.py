"""Messages in drain() and answering() run like those in a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections

from django_mq import RemoteError, ReplyTimeout, RetryPolicy, ask, handler, signals
from django_mq.executor.slice_limits import limits
from django_mq.models import QueuedMessage
from django_mq.testing import answering, drain, due
from testproject.shop.models import Product
from tests.testing.drain.conftest import _fails, names, send

# ---- handlers that fail


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_signals_are_sent(atomic: bool) -> None:
    heard: list[str] = []
    receivers = {}
    for name in ("message_acked", "message_retried", "message_started"):

        def receiver(sender: str, name: str = name, **data: Any) -> None:
            heard.append(f"{sender} {name}")

        receivers[name] = receiver
        getattr(signals, name).connect(receiver)

    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None:
        if delivery.payload:
            raise ValueError

    try:
        send("test.any", 0)
        send("test.any", 1)
        drain(errors="keep")
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    assert heard == [
        "any message_started",
        "any message_acked",
        "any message_started",
        "any message_retried",
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_expired_message_does_not_run(atomic: bool) -> None:
    ran: list[int] = []

    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None:
        ran.append(delivery.id)

    send("test.any", expires=3600)
    QueuedMessage.objects.update(expires_at="2000-01-01T00:00Z")
    drain()
    assert not ran
    assert QueuedMessage.objects.get().dead_reason == "expired"


@pytest.mark.django_db
def test_a_key_that_waits_keeps_no_other_from_running() -> None:
    """The claim that finds a message behind a delayed one parks it, and takes nothing."""
    ran: list[str] = []

    @handler("test.any", name="any")
    def any_(delivery: Any) -> None:
        ran.append(delivery.key)

    send("test.any", key="a", after=60)
    send("test.any", key="a")
    send("test.any", key="b")
    assert drain() == 1
    assert ran == ["b"]


@pytest.mark.django_db(transaction=True, available_apps=["django_mq", "testproject.shop"])
def test_in_an_async_test() -> None:
    """Through sync_to_async(), with handlers that use the ORM from their coroutine."""

    @handler("test.async", name="async")
    async def coroutine(delivery: Any) -> None:
        await Product.objects.acreate(name=f"coroutine {delivery.payload}", price=1)
        if delivery.payload:
            raise ValueError("no")

    async def test() -> None:
        try:
            await sync_to_async(send)("test.async", 0)
            assert await sync_to_async(drain)() == 1
            await sync_to_async(send)("test.async", 1)
            with pytest.raises(ValueError, match="no"):
                await sync_to_async(drain)()
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(asyncio.wait_for(test(), 60))
    assert names() == {"coroutine 0", "coroutine 1"}


# ---- answering()


@pytest.mark.django_db
def test_an_error_while_answering_reaches_the_test() -> None:
    """The asking code cannot see it: there the reply is only late."""
    _fails(ZeroDivisionError("no"), queue="answers")
    with pytest.raises(ReplyTimeout) as caught, answering():
        ask("test.fails")
    assert "ZeroDivisionError: no" in "\n".join(caught.value.__notes__)
    due()
    with pytest.raises(ZeroDivisionError), answering(), pytest.raises(ReplyTimeout):
        ask("test.fails")


@pytest.mark.django_db
def test_error_that_the_asker_gets_is_not_raised_twice() -> None:
    _fails(ZeroDivisionError("no"), queue="answers", retry=RetryPolicy.never())
    with answering(), pytest.raises(RemoteError, match="ZeroDivisionError"):
        ask("test.fails")


# ---- the limits of the server


@pytest.mark.parametrize(
    "_database",
    [
        pytest.param("a test's transaction", marks=pytest.mark.django_db),
        pytest.param(
            "none",
            marks=pytest.mark.django_db(
                transaction=True, available_apps=["django_mq", "testproject.shop"]
            ),
        ),
    ],
)
@pytest.mark.parametrize("batch", [True, False])
def test_a_handler_has_the_limits_of_the_test(_database: str, batch: bool) -> None:
    """Not those of a worker, which end a slow statement or a test that stops in a debugger."""
    found = []

    @handler("test.any", name="any", batch=batch)
    def any_(delivery: Any) -> None:
        found.append(_limits())

    before = _limits()
    for _ in range(2):
        send("test.any", key="one")
    drain()
    assert found == [before] * 2
    assert _limits() == before


def _limits() -> dict[str, str]:
    """Return the settings that a worker changes for a slice, as far as the server has them."""
    names = [
        *limits([1.0, 2.0], slice_seconds=0.1),
        *("statement_timeout", "lock_timeout", "transaction_timeout"),
    ]
    with connection.cursor() as cursor:
        cursor.execute("select name, setting from pg_settings where name = any(%s)", [names])
        return dict(cursor.fetchall())
