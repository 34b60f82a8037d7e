"""docs/guides/signals.md: receivers of other packages' signals, sent outside transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import transaction
from django.db.models.signals import post_save
from django.dispatch import Signal
from django.utils import timezone

from django_mq import NotInTransaction, broadcast
from django_mq.models import QueuedMessage
from django_mq.testing import assert_broadcast, deliver, drain
from testproject.shop.models import Invoice, Order, Product
from tests.docs.pages import namespace, story

pytestmark = pytest.mark.django_db


class Oscar:
    """The relevant part of django-oscar 4.2: the order commits, then the signal is sent."""

    def place_order(self, order: Order) -> Order:
        with transaction.atomic():
            order.save()
        order_placed.send(sender=self, order=order, user=None)
        return order


#: With the arguments of Wagtail 8.0 and django-oscar 4.2.
page_published = Signal()
order_placed = Signal()

MODULES = {
    "wagtail.signals": namespace("wagtail.signals", page_published=page_published),
    "oscar.apps.order": namespace("oscar.apps.order", utils=namespace("utils", OrderCreator=Oscar)),
    "oscar.apps.order.signals": namespace("signals", order_placed=order_placed),
}


@pytest.fixture
def page() -> Iterator[ModuleType]:
    signals = (post_save, page_published, order_placed)
    before = [list(signal.receivers) for signal in signals]
    with story("guides/signals.md", MODULES) as module:
        yield module
    for signal, receivers in zip(signals, before, strict=True):
        signal.receivers = receivers
        signal.sender_receivers_cache.clear()


@pytest.fixture
def order() -> Order:
    product = Product.objects.create(name="chair", price=20, stock=9)
    return Order(product=product, price=20, quantity=2, email="ada@example.com")


#: The recipe, its price and the title of the guide: an installed package has no docs/.
SAYS = r"broadcast\(\) alone: .* without its message .*guide \"Signals of code that is not yours"


def test_without_the_recipe_the_data_is_there_and_the_error_has_it(order: Order) -> None:
    def careless(sender: Any, order: Order, **kwargs: Any) -> None:
        broadcast("shop.orders.placed", {"order_id": order.pk})

    order_placed.connect(careless)
    try:
        with pytest.raises(NotInTransaction, match=SAYS):
            Oscar().place_order(order)
    finally:
        order_placed.disconnect(careless)
    assert Order.objects.filter(pk=order.pk).exists()


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic])
def test_users_from_the_command(page: ModuleType, block: Callable[[], Any]) -> None:
    with block():
        call_command(
            "createsuperuser", interactive=False, username="ada", email="a@b.de", verbosity=0
        )
    assert_broadcast("accounts.users.created", payload={"user_id": User.objects.get().pk}, times=1)


def test_a_transaction_around_the_command_takes_both_back(page: ModuleType) -> None:
    page.create_superuser(username="ada", email="a@b.de", verbosity=0)
    with pytest.raises(CommandError):
        page.create_superuser(username="", email="a@b.de", verbosity=0)
    assert QueuedMessage.objects.count() == User.objects.count() == 1


def test_a_published_page(page: ModuleType) -> None:
    page_published.send(sender=Order, instance=Order(pk=7), revision=Order(pk=8))
    (message,) = QueuedMessage.objects.all()
    assert (message.type, message.key) == ("cms.pages.published", "page/7")
    assert message.payload == {"page_id": 7, "revision_id": 8}
    assert message.metadata["model"] == "shop.order"


def test_an_order_of_oscar(page: ModuleType, order: Order) -> None:
    Oscar().place_order(order)
    assert drain() == 1
    assert Invoice.objects.get().order == order


def test_oscar_with_the_transaction_moved_outwards(page: ModuleType, order: Order) -> None:
    def fail(sender: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    order_placed.connect(fail)  # after the receiver that broadcasts
    with pytest.raises(ZeroDivisionError):
        page.OrderCreator().place_order(order)
    assert not QueuedMessage.objects.exists()
    assert not Order.objects.exists()


def test_sweep_finds_missed_orders_once(page: ModuleType, order: Order) -> None:
    order.save()  # and the process died before the signal
    Order.objects.update(placed_at=timezone.now() - timedelta(minutes=6))
    deliver(page.sweep_orders)
    deliver(page.sweep_orders)
    assert QueuedMessage.objects.count() == 1
    assert drain() == 1
    deliver(page.sweep_orders)
    assert not QueuedMessage.objects.exists()
    assert Invoice.objects.get().order == order


def test_a_command_of_ones_own(page: ModuleType, order: Order) -> None:
    order.save()
    command = page.Command()
    call_command(command, str(order.pk))
    assert_broadcast("shop.orders.cancelled", payload={"order_id": order.pk}, times=1)
    assert Order.objects.get().status == Order.Status.CANCELLED
