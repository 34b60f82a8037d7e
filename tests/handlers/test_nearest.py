"""A broadcast of a type that is probably misspelt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import transaction

from django_mq import broadcast, handler
from django_mq.handlers import isolated, nearest


@pytest.fixture(autouse=True)
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nearest, "_compared", set())
    with isolated():
        patterns = "shop.orders.placed", "shop.stock.*"
        handler(*patterns, name="gold", where={"tier": "gold"})(lambda delivery: None)
        yield


def warnings(caplog: pytest.LogCaptureFixture, *types: str) -> list[str]:
    for type in types:
        with transaction.atomic():
            broadcast(type)
    return [each.getMessage() for each in caplog.records if each.name == "django_mq"]


@pytest.mark.django_db(transaction=True)
def test_probable_typo_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, "shop.order.placed", "shop.order.placed") == [
        "no handler here takes the type shop.order.placed, which was broadcast: did you mean"
        " shop.orders.placed?"
    ]
    assert caplog.records[0].event == "probable_typo"  # type: ignore[attr-defined]


@pytest.mark.django_db(transaction=True)
def test_other_types_are_not(caplog: pytest.LogCaptureFixture) -> None:
    """Another project may take the type, or a handler takes it with other metadata."""
    assert warnings(caplog, "shop.orders.placed") == []
    assert warnings(caplog, "crm.customer.moved", "shop.orders.paid", "shop.stock.low") == []


def test_names_that_only_begin_alike_are_not_suggested() -> None:
    for last in ("paid", "changed"):
        handler(f"shop.orders.{last}", name=f"shop.handlers.{last}")(lambda delivery: None)
    handler("#", name="shop.handlers.s")(lambda delivery: None)
    nothing = f" ({nearest.IN_HANDLERS})"
    assert nearest.nearest_types("shop.orders.refunded") == nothing
    assert nearest.nearest_handlers("shop.handlers.dies") == nothing
    assert nearest.nearest_handlers("shop.handlers.padi").startswith(
        " (did you mean shop.handlers.paid? "
    )


def test_the_name_of_a_handler_is_not_its_type() -> None:
    """Other queues call functions by their names."""
    handler("shop.orders.paid", "shop.bills.*", name="shop.handlers.bill")(lambda delivery: None)
    handler("shop.bills.#", name="shop.handlers.log")(lambda delivery: None)
    assert nearest.probable_types("shop.handlers.bill") == ["shop.orders.paid"]
    assert nearest.probable_types("shop.handlers.log") == ["shop.bills.#"]
    assert nearest.nearest_types("shop.handlers.bill") == (
        " (that is the name of a handler: did you mean shop.orders.paid?)"
    )


def test_few_types_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing takes time, and types may be made up without end."""
    compared: list[str] = []
    monkeypatch.setattr(nearest, "probable_types", lambda type, _: compared.append(type))
    for number in range(nearest.MAX_COMPARED + 10):
        nearest.warn_of_typo(f"made.up.{number}")
    assert len(compared) == nearest.MAX_COMPARED
