"""The recipes for mails, with a real mail server: one connection, and distinct refusals."""

from __future__ import annotations

from collections.abc import Iterator
from smtplib import SMTPException
from typing import Any

import pytest
from django.core.mail import EmailMessage, get_connection
from django.db import transaction
from django.db.models.functions import Now

from django_mq import Message, RetryPolicy, broadcast_many, fixed, handler
from django_mq.handlers import isolated
from django_mq.models import QueuedMessage
from django_mq.worker import Worker
from testproject.shop.models import Order, Product
from tests.docs.pages import DOCS, story
from tests.docs.smtp import MailServer
from tests.test_docs import snippets

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # Django 6.1 has another name for it, unknown to older versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]

NAMES = ("ada", "bounce", "bob", "busy", "cy")


@pytest.fixture
def server(settings: Any) -> Iterator[MailServer]:
    with MailServer() as server:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT = server.server_address[:2]
        settings.EMAIL_TIMEOUT = 30
        # No message that waits for a retry is due before the test has checked it.
        later = RetryPolicy(backoff=fixed(3600))
        settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "RETRY": later}
        yield server


def place(type: str, *names: str) -> None:
    product = Product.objects.create(name="chair", price=20, stock=9)
    with transaction.atomic():
        orders = [
            Order.objects.create(product=product, price=20, quantity=1, email=f"{name}@example.com")
            for name in names or NAMES
        ]
        broadcast_many([Message(type, {"order_id": order.pk}) for order in orders])


def states() -> dict[str, str]:
    return {
        Order.objects.get(pk=each.payload["order_id"]).email.partition("@")[0]: str(each.state)
        for each in QueuedMessage.objects.all()
    }


def confirmation(payload: Any) -> EmailMessage:
    order = Order.objects.get(pk=payload["order_id"])
    return EmailMessage("Your order", "Thank you", "shop@example.com", [order.email])


@pytest.fixture
def confirmations() -> Iterator[None]:
    """The reference's handler, which sends a list of mails over one connection."""
    [code] = [each for each in snippets(DOCS / "reference.md", "python") if "smtp:" in each]
    names = {
        "handler": handler,
        "get_connection": get_connection,
        "confirmation": confirmation,
        "SMTPException": SMTPException,
    }
    with isolated():
        exec(code.replace("linger=2", "linger=0"), names)  # noqa: S102
        yield


@pytest.mark.usefixtures("confirmations")
def test_a_list_of_mails_goes_through_one_connection(server: MailServer) -> None:
    place("shop.orders.placed")
    assert Worker(max_seconds=60).run(until_empty=True)
    assert server.connections == 1
    assert server.letters == ["ada@example.com", "bob@example.com", "cy@example.com"]
    assert states() == {"bounce": "dead", "busy": "retrying"}


@pytest.mark.usefixtures("confirmations")
@pytest.mark.parametrize("culprit", ["hangup", "crash"])
def test_a_connection_that_ends_costs_one_mail_an_attempt(server: MailServer, culprit: str) -> None:
    """The mails behind it in the list were not tried."""
    place("shop.orders.placed", "ada", culprit, "bob", "cy")
    assert Worker(max_seconds=60).run(until_empty=True)
    assert server.letters == ["ada@example.com"]
    assert states() == {culprit: "retrying", "bob": "delayed", "cy": "delayed"}
    QueuedMessage.objects.update(processable_after=Now())
    assert Worker(max_seconds=60).run(until_empty=True)
    assert sorted(server.letters) == ["ada@example.com", "bob@example.com", "cy@example.com"]
    assert states() == {culprit: "retrying"}
    assert QueuedMessage.objects.get().attempts == 2


def test_mail_per_order_tells_bounced_from_busy(server: MailServer) -> None:
    with story("guides/files-and-mails.md"):
        place("shop.orders.placed")
        assert Worker(max_seconds=60).run(until_empty=True)
    assert sorted(server.letters) == ["ada@example.com", "bob@example.com", "cy@example.com"]
    assert states() == {"bounce": "dead", "busy": "retrying"}
