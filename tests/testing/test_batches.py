"""Lists of deliveries outside transactions, in drain() and deliver()."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from django_mq import Delivery, Reject, broadcast, handler, handlers
from django_mq.models import QueuedMessage
from django_mq.testing import deliver, drain

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True, params=[False, True], ids=["sync", "async"])
def ran(request: pytest.FixtureRequest) -> Any:
    """Return the payloads of the lists passed to the handler."""
    ran: list[list[Any]] = []

    def run(deliveries: list[Delivery]) -> list[str]:
        ran.append([each.payload["do"] for each in deliveries])
        for each in deliveries:
            each.extend(60)
            if each.payload["do"] == "reject":
                each.reject("no")
            if each.payload["do"] == "fail":
                each.fail(KeyError("x"))
        return ["done"] * len(deliveries)

    async def arun(deliveries: list[Delivery]) -> list[str]:
        deliveries[0].extend(60)
        return await sync_to_async(run)(deliveries)

    with handlers.isolated():
        options: dict[str, Any] = {"batch": True, "name": "h", "queue": "mail", "atomic": False}
        handler("t.do", **options)(arun if request.param else run)
        yield ran


def send(*todo: str) -> None:
    with transaction.atomic():
        for each in todo:
            broadcast("t.do", {"do": each})


def test_drain_heeds_the_answers(ran: list[list[Any]]) -> None:
    send("ack", "reject", "fail")
    errors = drain(errors="keep")
    assert (errors.deliveries, [type(each) for each in errors]) == (3, [KeyError])
    assert ran == [["ack"], ["reject"], ["fail"]]
    left = QueuedMessage.objects.order_by("pk").values_list("attempts", "dead_reason")
    assert list(left) == [(1, "no"), (1, "")]


def test_drain_raises_the_error_of_an_answer() -> None:
    send("fail")
    with pytest.raises(KeyError):
        drain()


def test_deliver_raises_the_answer(ran: list[list[Any]]) -> None:
    assert deliver("h", {"do": "ack"}) == ["done"]
    with pytest.raises(Reject, match="no"):
        deliver("h", {"do": "reject"})
    with pytest.raises(KeyError):
        deliver("h", {"do": "fail"})
    assert ran == [["ack"], ["reject"], ["fail"]]
