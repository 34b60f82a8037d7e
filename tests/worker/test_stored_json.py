"""Payloads written by other programs have the same limits as broadcast ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import Delivery, broadcast, handler, handlers
from django_mq.testing import drain
from tests.rows import add, stored
from tests.worker.conftest import Start

pytestmark = [pytest.mark.django_db, pytest.mark.thorough]


@pytest.fixture(autouse=True)
def ran() -> Iterator[list[Any]]:
    """Return the payloads that a handler got."""
    ran: list[Any] = []
    with handlers.isolated():

        @handler("a", name="h", queue="mail")
        def h(delivery: Delivery) -> None:
            ran.append(delivery.payload)

        yield ran


def write(column: str, text: str) -> None:
    """Write a column like psql."""
    with connection.cursor() as cursor:
        cursor.execute(f"update django_mq_queuedmessage set {column} = %s::jsonb", [text])


@pytest.mark.parametrize("named", [True, False], ids=["named", "unrouted"])
@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("payload", '"%s"' % ("x" * 50_000_000), "payload has more than 1,048,576 bytes of JSON"),
        ("payload", '"%s"' % ("ä" * 600_000), "payload has more than 1,048,576 bytes of JSON"),
        ("payload", "[" * 5_000 + "]" * 5_000, "payload is nested deeper than 64 levels"),
        ("payload", "[" * 65 + "]" * 65, "payload is nested deeper than 64 levels"),
        ("payload", '{"a":' * 65 + "1" + "}" * 65, "payload is nested deeper than 64 levels"),
        ("metadata", '{"a":"%s"}' % ("x" * 20_000), "metadata has more than"),
        ("metadata", '{"a":' * 65 + "1" + "}" * 65, "metadata is nested deeper than 64 levels"),
    ],
    ids=["50 MB", "characters", "5,000 deep", "arrays", "objects", "metadata", "deep metadata"],
)
def test_message_beyond_a_limit_is_held(
    ran: list[Any], column: str, text: str, reason: str, named: bool
) -> None:
    """Guarantee 14: no attempt is used, and the message behind it runs."""
    bad = add(type="a", handler="h" if named else "", after=-60)
    write(column, text)
    add(type="a", handler="h", payload={"n": 1}, after=-30)
    assert drain() == 1
    assert ran == [{"n": 1}]
    message = type(bad).objects.defer("payload", "metadata").get(pk=bad.pk)
    assert (message.attempts, message.dead_at) == (0, None)
    assert message.held_since is not None
    assert reason in message.last_error


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("payload", '"%s"' % ("x" * 1_100_000)),
        ("payload", "[" * 65 + "]" * 65),
        ("metadata", '{"a":"%s"}' % ("x" * 20_000)),
        ("metadata", '{"a":' * 65 + "1" + "}" * 65),
    ],
    ids=["long", "deep", "long metadata", "deep metadata"],
)
def test_a_worker_holds_it_between_others(
    ran: list[Any], start: Start, column: str, text: str
) -> None:
    """A worker looks at the rows of a claim together, before it looks at one of them."""
    bad = add(type="a", handler="h", after=-40)
    write(column, text)
    for n, after in enumerate((-60, -50, -30, -20)):
        add(type="a", handler="h", payload={"n": n}, after=after)
    assert start(until_empty=True).join()
    assert ran == [{"n": n} for n in range(4)]
    assert stored(bad).held_since is not None
    assert type(bad).objects.count() == 1


def test_a_payload_at_the_limits_runs(ran: list[Any]) -> None:
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    with transaction.atomic():
        broadcast("a", deep)
        broadcast("a", ["["] * 10_000)
        broadcast("a", "x" * (2**20 - 2))
    assert drain() == 3


@pytest.mark.parametrize(
    "payload",
    [
        [1e308] * 140_000,
        [1.7976931348623157e308] * 40_000,
        [-5e-324] * 110_000,
        [1e16] * 170_000,
        [0.00001] * 170_000,
        [1e24] * 170_000,
        [1] * 500_000,
        [{"a": 1}] * 130_000,
        [[]] * 340_000,
        ["ä"] * 200_000,
        "0" * 1_000_000,
    ],
    ids=lambda payload: repr(payload[:1])[:20],
)
def test_growth_in_jsonb_does_not_exceed_the_limit(ran: list[Any], payload: Any) -> None:
    """PostgreSQL writes 1e308 with 309 digits, and a space after each comma."""
    with transaction.atomic():
        broadcast("a", payload)
    assert drain() == 1
    [got] = ran
    assert len(got) == len(payload)
    assert got[:2] == payload[:2] or list(map(float, got[:2])) == payload[:2]


def test_the_limits_are_those_of_the_settings(settings: Any, ran: list[Any]) -> None:
    message = add(type="a", handler="h", payload={"text": "x" * 2_000})
    settings.DJANGO_MQ = {"MAX_PAYLOAD_BYTES": 1_000}
    assert drain() == 0
    assert "(MAX_PAYLOAD_BYTES)" in stored(message).last_error
