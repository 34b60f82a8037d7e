"""drain() and handlers that break or end the transaction of the test."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from django.db import DataError, connection, transaction

from django_mq import HandlerBrokeTransaction, LeaseLost, broadcast, handler
from django_mq.models import QueuedMessage
from django_mq.testing import drain
from tests.testing.drain.conftest import names, send, write


def swallow_a_database_error() -> None:
    with contextlib.suppress(DataError), connection.cursor() as cursor:
        cursor.execute("select 1/0")


@pytest.mark.django_db
def test_swallowed_database_error_that_spoils_the_test_transaction_is_raised() -> None:
    """A non-atomic handler may do that in a worker; a TestCase runs it all in one transaction."""

    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        swallow_a_database_error()

    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="TransactionTestCase"):
        drain()
    assert QueuedMessage.objects.get().state == "retrying"


@pytest.mark.django_db(transaction=True, available_apps=["django_mq", "testproject.shop"])
def test_without_a_transaction_of_the_test_it_may_be_swallowed() -> None:
    @handler("test.swallows", name="swallows", atomic=False)
    def swallows(delivery: Any) -> None:
        swallow_a_database_error()

    send("test.swallows")
    assert drain() == 1
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db
def test_block_left_open_raises() -> None:
    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        transaction.atomic().__enter__()
        write("undone")

    depth = len(connection.atomic_blocks)
    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="left an atomic"):
        drain()
    assert len(connection.atomic_blocks) == depth
    assert not names()


@pytest.mark.django_db
def test_an_ack_of_finish_that_the_handler_undoes_leaves_a_failed_message() -> None:
    """In a worker it would be committed; here its transaction is that of the test."""

    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        with delivery.finish():
            write("undone")
        swallow_a_database_error()

    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="TransactionTestCase"):
        drain()
    assert not names()
    assert QueuedMessage.objects.get().state == "retrying"


@pytest.mark.django_db
def test_handler_that_ends_the_test_transaction_is_named() -> None:
    """Nothing can be repaired then; the text names the culprit."""

    @handler("test.fails", name="fails")
    def fails(delivery: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("rollback")

    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="ended its transaction") as caught:
        drain()
    assert "handler fails" in caught.value.__notes__[0]
    connection.set_rollback(True)


@pytest.mark.django_db
def test_handler_that_removes_its_message_fails() -> None:
    @handler("test.fails", name="fails")
    def fails(delivery: Any) -> None:
        write("undone")
        QueuedMessage.objects.filter(pk=delivery.id).delete()

    send("test.fails")
    with pytest.raises(LeaseLost) as caught:
        drain()
    assert "handler fails" in caught.value.__notes__[0]
    assert not names()
    assert QueuedMessage.objects.count() == 1, "what the handler did is undone"


@pytest.mark.django_db(transaction=True, available_apps=["django_mq", "testproject.shop"])
@pytest.mark.parametrize("atomic", [True, False])
def test_drain_does_not_commit_with_autocommit_off(atomic: bool, settings: Any) -> None:
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}

    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None:
        write("by the handler")
        if delivery.payload:
            raise ValueError

    connection.set_autocommit(False)
    try:
        write("by the test")
        broadcast("test.any", 0)
        assert drain() == 1
        assert names() == {"by the test", "by the handler"}
        connection.rollback()
        assert not names()
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_drain_in_an_open_block_raises_with_a_hint(atomic: bool) -> None:
    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None: ...

    with transaction.atomic():
        broadcast("test.any")
        with pytest.raises(RuntimeError, match=r"call drain\(\) after the block"):
            drain()
    assert drain() == 1
