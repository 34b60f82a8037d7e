"""The guide's recipe passes on orders of django-oscar, both unmodified and with a forked app."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings
from django.test import TransactionTestCase
from oscar.apps.order.signals import order_placed
from oscar.core.loading import get_class, get_model
from oscar.test import factories
from oscar.test.basket import add_product

from django_mq.models import QueuedMessage
from django_mq.worker import Worker

Order, Basket = get_model("order", "Order"), get_model("basket", "Basket")
FORKED = any("forked" in each for each in settings.INSTALLED_APPS)


class Refusal(Exception):
    pass


def refuse(**kwargs: Any) -> None:
    raise Refusal


class OrderTests(TransactionTestCase):
    def place(self) -> Any:
        """Call it the way the last step of the checkout does."""
        basket = factories.create_basket(empty=True)
        add_product(basket, product=factories.create_product(price=20, num_in_stock=9))
        creator = get_class("order.utils", "OrderCreator")()
        assert ("forked" in type(creator).__module__) is FORKED
        charge = get_class("shipping.methods", "Free")().calculate(basket)
        total = get_class("checkout.calculators", "OrderTotalCalculator")().calculate(
            basket, charge
        )
        return creator.place_order(
            basket=basket,
            total=total,
            shipping_method=get_class("shipping.methods", "Free")(),
            shipping_charge=charge,
            order_number="100",
        )

    def test_an_order_reaches_its_handler(self) -> None:
        order = self.place()
        (message,) = QueuedMessage.objects.all()
        assert (message.type, message.unique_id) == ("shop.orders.placed", f"order-{order.pk}")
        assert message.payload == {"order_id": order.pk}
        assert Worker(max_seconds=120).run(until_empty=True)
        assert [each.message for each in order.notes.all()] == ["handled"]

    def test_a_receiver_that_fails_later(self) -> None:
        """If the transaction encloses both, both are undone; otherwise both had committed."""
        order_placed.connect(refuse)
        try:
            with pytest.raises(Refusal):
                self.place()
        finally:
            order_placed.disconnect(refuse)
        left = 0 if FORKED else 1
        assert (Order.objects.count(), QueuedMessage.objects.count()) == (left, left)
