"""NotInTransaction and CannotWait in a handler: its advice comes before logs cut the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from django_mq import CannotWait, NotInTransaction, ask, broadcast, handler, request
from django_mq.testing import deliver
from tests.rows import add
from tests.worker.conftest import Running

pytestmark = pytest.mark.django_db(transaction=True)

FINISH = (
    "broadcast() in the handler shop.chain, which is not atomic: call it inside `with"
    " delivery.finish():` (then it commits with the ack), or inside transaction.atomic()"
)


def on(function: Callable[[Any], Any], **options: Any) -> None:
    handler("#", queue="mail", name="shop.chain", **options)(function)


def chain(argument: Any) -> None:
    broadcast("shop.next")


async def coroutine(argument: Any) -> None:
    broadcast("shop.next")


async def in_thread(argument: Any) -> None:
    await sync_to_async(broadcast)("shop.next")


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (chain, {"atomic": False}, FINISH),
        (in_thread, {}, FINISH),
        (
            chain,
            {"atomic": False, "batch": True},
            "broadcast() in the handler shop.chain, which is not atomic: call it inside"
            " transaction.atomic()",
        ),
        (
            coroutine,
            {},
            "broadcast() in the handler shop.chain, which is not atomic: put it into a function and"
            " `await delivery.afinish(function)` (then it commits with the ack), or `await"
            " abroadcast()`, which commits by itself",
        ),
        (
            coroutine,
            {"batch": True},
            "broadcast() in the handler shop.chain, which is not atomic: `await abroadcast()`,"
            " which commits by itself",
        ),
    ],
    ids=["sync", "thread", "batch", "async", "async batch"],
)
def test_error_outside_a_transaction_names_the_block_to_use(
    function: Any, options: Any, text: str
) -> None:
    on(function, **options)
    with pytest.raises(NotInTransaction) as caught:
        deliver("shop.chain")
    assert str(caught.value) == text


def test_the_row_shows_the_advice(start: Callable[..., Running]) -> None:
    on(chain, atomic=False)
    message = add(handler="shop.chain", max_attempts=1)
    assert start(until_empty=True).join()
    message.refresh_from_db()
    assert message.last_error == f"django_mq.exceptions.NotInTransaction: {FINISH}"


def test_a_hook_runs_after_the_transaction_of_its_handler(start: Callable[..., Running]) -> None:
    errors: list[str] = []

    def hook() -> None:
        with pytest.raises(NotInTransaction) as caught:
            broadcast("shop.next")
        errors.append(str(caught.value))

    on(lambda delivery: transaction.on_commit(hook))
    add(handler="shop.chain")
    assert start(until_empty=True).join()
    assert errors == [
        "broadcast() for the handler shop.chain, but outside its transaction, as in an on_commit"
        " hook: call it in the handler itself, or inside transaction.atomic()"
    ]


def test_ask_in_an_atomic_handler_explains_the_error_first() -> None:
    on(lambda delivery: ask("shop.next"))
    says = re.escape(
        "ask() in the handler shop.chain, which is atomic, would wait for a reply to a message that"
        " is not committed yet: a handler that asks needs @handler(atomic=False)"
    )
    with pytest.raises(CannotWait, match=f"^{says}$"):
        deliver("shop.chain")


def test_wait_in_an_atomic_handler_explains_the_error() -> None:
    on(lambda delivery: request("shop.next").result())
    with pytest.raises(CannotWait, match=r"a handler that waits needs @handler\(atomic=False\)$"):
        deliver("shop.chain")


def test_a_block_of_its_own_is_not_the_handlers() -> None:
    def asks(delivery: Any) -> None:
        with transaction.atomic():
            ask("shop.next")

    on(asks, atomic=False)
    with pytest.raises(CannotWait, match="Call it before or after the block"):
        deliver("shop.chain")
