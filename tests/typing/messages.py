"""Code for type checkers: mypy and pyright read this in CI, and nothing here is executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from django_mq import Delivery, Message, Receipt, broadcast, handler, message, upcast


@message("shop.orders.placed", version=2)
@dataclass
class OrderPlaced:
    order_id: int


@upcast("shop.orders.placed", 1)
def add_order_id(payload: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": payload["id"]}


@handler("shop.orders.placed")
def write_invoice(delivery: Delivery[OrderPlaced]) -> None:
    assert_type(delivery.payload, OrderPlaced)
    assert_type(delivery.payload.order_id, int)
    _ = delivery.payload.number  # type: ignore[attr-defined]


@handler("shop.orders.placed")
def audit(delivery: Delivery) -> None:
    assert_type(delivery.payload, Any)


@handler("shop.orders.placed")
def count(event: OrderPlaced) -> int:
    return event.order_id


assert_type(OrderPlaced(7), OrderPlaced)
assert_type(broadcast(OrderPlaced(7), key="a"), Receipt)
assert_type(broadcast("shop.orders.placed", {"order_id": 7}), Receipt)
assert_type(Message(OrderPlaced(7)), Message)
assert_type(Message("a.b").type, str)
count(OrderPlaced(7))
broadcast(7)  # type: ignore[arg-type]
broadcast(OrderPlaced(7), keey="a")  # type: ignore[call-arg]
OrderPlaced("7")  # type: ignore[arg-type]
