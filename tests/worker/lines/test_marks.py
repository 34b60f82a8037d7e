"""A line that is never scanned from the front again loses nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from django_mq import broadcast, handler
from django_mq.messages import Delivery
from django_mq.policy import line_marks
from django_mq.worker.watermarks import Watermarks
from testproject.shop.models import Product
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Start

pytestmark = pytest.mark.django_db(transaction=True)

TURNS = 8


def test_marks_pass_no_message_whose_transaction_is_open(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones commit, and run, before it: it comes as soon as it commits."""
    monkeypatch.setattr(line_marks, "INSERT_SECONDS", 0.0)  # each has its transaction id early
    monkeypatch.setattr(
        Watermarks, "full_in", lambda own: 0.0 if own._last_full == float("-inf") else 60.0
    )
    ran: list[tuple[str, int]] = []

    @handler("a", queue="line")
    def h(delivery: Delivery) -> None:
        ran.append(tuple(delivery.payload))

    def overtake(turn: int) -> None:
        try:
            for number in range(turn, turn + 4):
                with transaction.atomic():
                    broadcast("a", ["quick", number])
                until(lambda: ("quick", number) in ran)  # noqa: B023
        finally:
            connections.close_all()

    start(queues=["line"])
    with ThreadPoolExecutor(1) as pool:
        for turn in range(0, 4 * TURNS, 4):
            with transaction.atomic():
                Product.objects.create(name=f"{turn}", price=1)
                broadcast("a", ["late", turn])
                pool.submit(overtake, turn).result(PATIENCE)
            until(lambda: ("late", turn) in ran)  # noqa: B023
    assert len(ran) == 5 * TURNS
