"""The shop: the commits of its views, and the work of its handlers."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from smtplib import SMTPServerDisconnected
from typing import Any

import pytest
from django.db import IntegrityError
from django.test import Client
from django.utils import timezone

from django_mq import queues
from django_mq.models import FailedAttempt, QueuedMessage, Schedule
from django_mq.testing import deliver, drain, due
from testproject.shop import handlers, mailing
from testproject.shop.models import Invoice, Order, Product, Report, Statistic
from tests.docs.smtp import MailServer

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def letters(settings: Any, tmp_path: Path) -> Path:
    """The directory for letters."""
    settings.SHOP_LETTERS = tmp_path
    return tmp_path


@pytest.fixture
def tea() -> Product:
    return Product.objects.create(name="tea", price="4.50", stock=10)


def post(path: str, body: Any) -> Any:
    """Post JSON like the storefront: without a token or a cookie."""
    content = body if isinstance(body, str) else json.dumps(body)
    client = Client(enforce_csrf_checks=True)
    return client.post(path, content, content_type="application/json")


def place(product: Product, /, **changes: Any) -> Any:
    return post(
        "/orders/", {"product": product.pk, "quantity": 2, "email": "ada@example.com"} | changes
    )


def queued() -> set[tuple[str, str]]:
    return set(QueuedMessage.objects.values_list("queue", "type"))


def stock(product: Product) -> int:
    product.refresh_from_db()
    return product.stock


def test_catalogue(client: Client, tea: Product) -> None:
    assert client.get("/").json() == {
        "products": [{"id": tea.pk, "name": "tea", "price": "4.50", "stock": 10}]
    }


def test_an_order_is_stored_with_a_message_for_each_handler(tea: Product) -> None:
    answer = place(tea)
    assert answer.status_code == 201
    order = Order.objects.get()
    assert answer.json() == {"order": order.pk}
    assert queued() == {
        ("invoices", "shop.orders.placed"),
        ("mail", "shop.orders.placed"),
        ("statistics", "shop.orders.placed"),
    }
    assert stock(tea) == 8


def test_refused_order_leaves_no_row_and_no_message(tea: Product) -> None:
    answer = place(tea, quantity=11)
    assert (answer.status_code, answer.json()) == (409, {"error": "out of stock"})
    assert not Order.objects.exists()
    assert not QueuedMessage.objects.exists()
    assert stock(tea) == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"product": 0},
        {"product": 10**30},
        {"product": [1]},
        {"quantity": 0},
        {"quantity": 21},
        {"quantity": "many"},
        {"email": "nobody"},
        {"email": "a@example.com\nBcc: b@example.com"},
        {"run": "../../etc"},  # it names a directory
    ],
)
def test_a_form_that_is_wrong_is_refused(tea: Product, changes: dict[str, Any]) -> None:
    answer = place(tea, **changes)
    assert answer.status_code == 400
    assert list(answer.json()["errors"]) == list(changes)
    assert not QueuedMessage.objects.exists()


@pytest.mark.parametrize("body", ["", "{", "[]", "null", "[" * 100_000, "\udcff"])
def test_body_that_is_no_form_is_refused(body: str) -> None:
    assert post("/orders/", body.encode(errors="replace").decode()).status_code == 400


def test_orders_are_posted(client: Client) -> None:
    assert client.get("/orders/").status_code == 405


def test_all_that_an_order_sets_off(tea: Product, letters: Path) -> None:
    place(tea, run="spring-sale")
    Product.objects.update(price=100)  # too late for this order
    drain()
    order = Order.objects.get()
    assert order.status == Order.Status.PACKED
    assert order.mailed_at
    invoice = Invoice.objects.get(order=order)
    assert (invoice.total, invoice.number) == (9, f"{order.placed_at:%Y}-{order.pk:06}")
    statistic = Statistic.objects.get(product=tea)
    assert (statistic.sold, statistic.cancelled) == (2, 0)
    [letter] = (path for path in letters.rglob("*") if path.is_file())
    assert letter == letters / "spring-sale" / f"order-{order.pk}.eml"
    assert "To: ada@example.com" in letter.read_text()
    assert not QueuedMessage.objects.exists()


def test_old_sales_are_forgotten_once_a_day(tea: Product) -> None:
    today = timezone.localdate()
    for age in (364, 366):
        Statistic.objects.create(product=tea, day=today - timedelta(days=age))
    assert due(until=timedelta(days=1)) == 1
    drain()
    assert Statistic.objects.get().day == today - timedelta(days=364)


def test_a_report_by_the_clock(tea: Product) -> None:
    """The demo enables it; each scheduled time has one report."""
    for _ in range(2):
        place(tea)
    drain()
    due(until=timedelta(seconds=0))
    assert not Schedule.objects.get(name=handlers.REPORTS).enabled
    queues.enable_schedule(handlers.REPORTS)
    assert due(until=timedelta(seconds=5)) == 2
    drain()
    first, second = Report.objects.order_by("scheduled_for")
    assert second.scheduled_for - first.scheduled_for == timedelta(seconds=2)
    assert (first.orders, first.turnover) == (2, 18)


def test_a_letter_that_is_refused_at_first_is_sent_again(tea: Product, letters: Path) -> None:
    place(tea, email="flaky+2@example.com")
    errors: list[BaseException] = []
    while QueuedMessage.objects.exists():
        assert not list(letters.rglob("*.eml"))
        errors += drain(errors="keep")
        assert Invoice.objects.count() == 1  # the handlers fail apart
        due()
    assert len(errors) == 2
    assert len(list(letters.rglob("*.eml"))) == 1


def test_a_letter_that_cannot_arrive_is_a_dead_letter(tea: Product) -> None:
    place(tea, email="bounce@example.com")
    drain()
    dead = QueuedMessage.objects.get()
    assert dead.queue == "mail"
    assert dead.dead_at
    assert dead.dead_reason == "550 no such mailbox: bounce@example.com"
    assert Invoice.objects.exists()
    assert not Order.objects.get().mailed_at


def test_a_letter_sent_again_is_the_same_letter(tea: Product, letters: Path) -> None:
    place(tea)
    order = Order.objects.get()
    files = {mailing.send(order, attempt=attempt) for attempt in (1, 2)}
    [letter] = files
    assert list(letters.iterdir()) == [letter]  # and no draft is left
    assert letter.read_text().count("Message-ID") == 1


def test_a_letter_that_cannot_be_stored_leaves_no_draft(
    tea: Product, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    place(tea)
    monkeypatch.setattr(mailing.EmailBackend, "send_messages", fail)
    with pytest.raises(OSError, match="no space"):
        mailing.send(Order.objects.get(), attempt=1)
    assert not list(letters.iterdir())


@pytest.fixture
def mail_server(settings: Any) -> Iterator[MailServer]:
    """The result of EMAIL_URL: a server, so that no files are written."""
    with MailServer() as server:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT = server.server_address
        yield server


def test_letters_of_a_batch_share_a_connection(
    tea: Product, letters: Path, mail_server: MailServer
) -> None:
    for name in ("ada", "bounce", "busy", "eve"):
        place(tea, email=f"{name}@example.com")
    with mailing.connection() as send:
        for order in Order.objects.filter(email__in=("ada@example.com", "eve@example.com")):
            send(order, attempt=1)
    assert (mail_server.connections, len(mail_server.letters)) == (1, 2)
    assert not list(letters.rglob("*.eml"))


@pytest.mark.parametrize("culprit", ["hangup", "crash"])
def test_a_server_that_ends_the_connection(
    tea: Product, mail_server: MailServer, culprit: str
) -> None:
    """One letter fails; the one behind it was not tried, and its error says so."""
    for name in ("ada", culprit, "eve"):
        place(tea, email=f"{name}@example.com")
    ada, bad, eve = Order.objects.order_by("pk")
    with mailing.connection() as send:
        send(ada, attempt=1)
        with pytest.raises((mailing.MailServerBusy, SMTPServerDisconnected)):
            send(bad, attempt=1)
        with pytest.raises(mailing.MailServerAway):
            send(eve, attempt=1)
    assert mail_server.letters == ["ada@example.com"]


def test_a_server_that_is_away_costs_no_attempt(tea: Product, settings: Any) -> None:
    with MailServer() as server:
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        settings.EMAIL_HOST, settings.EMAIL_PORT = server.server_address
    place(tea, email="ada@example.com")
    drain("mail", errors="keep")
    assert QueuedMessage.objects.get(queue="mail").attempts == 0
    assert not FailedAttempt.objects.exists()


def test_a_server_refuses_for_now_or_for_good(tea: Product, mail_server: MailServer) -> None:
    for name in ("ada", "bounce", "busy", "eve"):
        place(tea, email=f"{name}@example.com")
    drain(errors="keep")
    assert sorted(mail_server.letters) == ["ada@example.com", "eve@example.com"]
    assert Order.objects.exclude(mailed_at=None).count() == 2
    reasons = dict(QueuedMessage.objects.values_list("payload__order_id", "dead_reason"))
    orders = dict(Order.objects.values_list("email", "pk"))
    assert reasons[orders["bounce@example.com"]] == "550 no such mailbox: bounce@example.com"
    assert reasons[orders["busy@example.com"]] == ""  # is sent again


def test_a_mailbox_that_the_server_does_not_know_is_a_dead_letter(
    tea: Product, mail_server: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailing, "_trouble", lambda email, attempt: None)
    place(tea, email="bounce@example.com")
    drain()
    assert "no such mailbox" in str(QueuedMessage.objects.get().dead_reason)


def test_sales_are_counted_once_for_many(tea: Product) -> None:
    cup = Product.objects.create(name="cup", price="9.90", stock=10)
    for product, quantity in ((tea, 1), (cup, 2), (tea, 3)):
        place(product, quantity=quantity)
    drain("statistics")
    assert dict(Statistic.objects.values_list("product__name", "sold")) == {"tea": 4, "cup": 2}


def test_a_cancelled_order(tea: Product) -> None:
    order = place(tea).json()["order"]
    drain()
    path, email = f"/orders/{order}/cancel/", {"email": "ada@example.com"}
    assert post(path, {"email": "eve@example.com"}).status_code == 404
    assert post(path, "nothing").status_code == 404
    assert post(path, email).status_code == 200
    assert stock(tea) == 10
    assert queued() == {("statistics", "shop.orders.cancelled")}
    assert post(path, email).status_code == 404  # once is enough
    assert stock(tea) == 10
    drain()
    statistic = Statistic.objects.get()
    assert (statistic.sold, statistic.cancelled) == (2, 2)
    assert Order.objects.get().status == Order.Status.CANCELLED


def test_an_order_cancelled_before_it_is_packed_stays_cancelled(tea: Product) -> None:
    order = place(tea).json()["order"]
    post(f"/orders/{order}/cancel/", {"email": "ada@example.com"})
    drain()
    assert Order.objects.get().status == Order.Status.CANCELLED


def test_two_runs_of_the_invoice_handler_make_one_invoice(tea: Product) -> None:
    place(tea)
    order = Order.objects.get()
    deliver(handlers.write_invoice, {"order_id": order.pk})
    with pytest.raises(IntegrityError):
        deliver(handlers.write_invoice, {"order_id": order.pk})
    assert Invoice.objects.count() == 1


def test_the_admin_shows_it(tea: Product, admin_client: Client) -> None:
    place(tea)
    drain()
    for model in ("product", "order", "invoice", "statistic"):
        assert admin_client.get(f"/admin/shop/{model}/").status_code == 200
