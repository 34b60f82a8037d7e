"""abroadcast()."""

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import TestCase

from django_mq import InvalidPayload, NotInTransaction, Receipt, abroadcast, broadcast
from django_mq.models import QueuedMessage
from tests.database import listening, second_connection


@pytest.mark.django_db(transaction=True)
def test_abroadcast_has_committed_when_it_returns() -> None:
    async def produce() -> Receipt:
        return await abroadcast("a.b", {"n": 1}, queue="q", using="default")

    with listening() as listener, second_connection() as other:
        receipt = async_to_sync(produce)()
        found = other.execute("select id, queue, payload from django_mq_queuedmessage").fetchall()
        assert found == [(receipt.ids[0], "q", {"n": 1})]
        assert listener.heard() == [""]


@pytest.mark.django_db(transaction=True)
def test_abroadcast_refuses_to_pretend_inside_a_block() -> None:
    with transaction.atomic():
        with pytest.raises(RuntimeError, match="a transaction of its own"):
            async_to_sync(abroadcast)("a.b")
        assert not QueuedMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_abroadcast_refuses_to_pretend_while_autocommit_is_off() -> None:
    """Only the caller's own commit would make the message visible."""
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit is off"):
            async_to_sync(abroadcast)("a.b")
        assert not QueuedMessage.objects.exists()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.django_db(transaction=True)
def test_abroadcast_has_the_refusals_of_broadcast() -> None:
    with pytest.raises(InvalidPayload):
        async_to_sync(abroadcast)("a.b", float("nan"))
    with pytest.raises(TypeError):
        async_to_sync(abroadcast)("a.b", delay=5)  # type: ignore[call-arg]
    assert not QueuedMessage.objects.exists()


class TestInATestCase(TestCase):
    async def test_abroadcast_works(self) -> None:
        assert await abroadcast("a.b")

    async def test_broadcast_in_async_code_suggests_abroadcast(self) -> None:
        with pytest.raises(NotInTransaction, match="abroadcast"):
            broadcast("a.b")
