"""Which names are suggested for an unknown one: similar ones, or none."""

from __future__ import annotations

import pytest

from django_mq.handlers.nearest import TYPO
from django_mq.policy.similar_names import similar

TYPES = (
    "shop.orders.placed",
    "shop.orders.paid",
    "shop.orders.changed",
    "shop.stock.low",
    "shop.handlers.s",
    "shop.handlers.send_receipt",
    "shop.handlers.write_invoice",
    "mail",
)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("shop.orders.refunded", []),  # whatever begins with shop.orders
        ("shop.handlers.dies", []),
        ("shop.customers.placed", []),  # whatever ends with placed
        ("bank.orders.placed", []),
        ("shop.orders", []),
        ("shop.orders.placed.late", []),
        ("", []),
        ("shop.orders.plcaed", ["shop.orders.placed"]),
        ("shop.order.placed", ["shop.orders.placed"]),
        ("shp.order.place", ["shop.orders.placed"]),  # several typos
        ("shop.stocklow", ["shop.stock.low"]),  # a dot is missing
        ("shop.orders.pla.ced", ["shop.orders.placed"]),
        ("shop.handlers.send_reciept", ["shop.handlers.send_receipt"]),
        ("mial", ["mail"]),
        ("Shop.orders.paid", ["shop.orders.paid"]),
        ("orders.paid", ["shop.orders.paid"]),  # without the app
        ("shop.orders.placed", ["shop.orders.placed"]),
    ],
)
def test_suggestions(name: str, suggested: list[str]) -> None:
    assert similar(name, TYPES) == suggested


@pytest.mark.parametrize("typo", ["shop.odrers.paid", "shop.orders.piad", "SHOP.orders.paid"])
def test_a_slip_of_the_fingers_is_a_typo(typo: str) -> None:
    assert similar(typo, TYPES, cutoff=TYPO) == ["shop.orders.paid"]


def test_the_most_similar_comes_first_and_few_are_given() -> None:
    known = ["ledger", "ledgers", "ledgerbook", "ledge"]
    assert similar("ledgr", known) == ["ledger", "ledgers", "ledge"]
    assert similar("ledgr", known, most=1) == ["ledger"]
