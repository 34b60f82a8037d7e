"""docs/faq.md: the chain of causes in the threads of a handler."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_mq import broadcast, handler
from django_mq.models import QueuedMessage
from django_mq.testing import deliver
from tests.docs.pages import story


def upload(order: int) -> None:
    """Broadcast from a thread, which has a connection of its own."""
    try:
        with transaction.atomic():
            broadcast("shop.orders.exported", {"order": order})
    finally:
        connection.close()


def unset(name: str, default: str) -> str:
    return default


def test_the_router_of_workers_reads_from_the_primary(settings: Any) -> None:
    with story("faq.md", handler=handler, env=unset) as page:
        router = page.ReplicaRouter()
        settings.READ_FROM = page.READ_FROM
        assert (router.db_for_read(None), router.db_for_write(None)) == ("replica", "default")
    with story("faq.md", handler=handler, env=lambda name, default: "default") as page:
        settings.READ_FROM = page.READ_FROM
        assert page.ReplicaRouter().db_for_read(None) == "default"


@pytest.mark.django_db(transaction=True)
def test_causes_of_broadcasts_in_threads_of_a_handler() -> None:
    def origins() -> list[Any]:
        found = QueuedMessage.objects.values_list("metadata", flat=True)
        return [(each.get("mq.hops"), each.get("mq.correlation_id")) for each in found]

    chain = {"mq.hops": 4, "mq.correlation_id": "c"}
    with story("faq.md", handler=handler, upload=upload, env=unset) as page:
        deliver(page.export, {"orders": [1, 2, 3]}, metadata=chain)
        assert origins() == [(5, "c")] * 3

        @handler("lost", atomic=False)
        def lost(delivery: Any) -> None:
            with ThreadPoolExecutor() as pool:
                pool.submit(upload, 1).result()

        @handler("kept")
        async def kept(delivery: Any) -> None:
            await asyncio.to_thread(upload, 1)
            await sync_to_async(upload)(2)

        for each, expected in ((lost, [(None, None)]), (kept, [(5, "c")] * 2)):
            QueuedMessage.objects.all().delete()
            deliver(each, {}, metadata=chain)
            assert origins() == expected
