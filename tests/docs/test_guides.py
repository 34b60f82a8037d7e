"""The other pages of docs/guides/: each snippet runs, and behaves as the text says."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from django.core import mail
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.db import transaction
from django.utils import timezone

from django_mq import Delivery, Message, Reject, broadcast_many, handler, queues
from django_mq.conf import find_errors
from django_mq.models import QueuedMessage
from django_mq.testing import assert_broadcast, drain, due
from testproject.shop.models import Export, Invoice, Order, Product
from tests.docs.pages import passes, story

pytestmark = pytest.mark.django_db

MEMORY = {"default": {"BACKEND": "django.core.files.storage.InMemoryStorage"}}


def order(quantity: int = 2, name: str = "chair") -> Order:
    product, _ = Product.objects.get_or_create(name=name, defaults={"price": 20, "stock": 9})
    return Order.objects.create(
        product=product, price=20, quantity=quantity, email="ada@example.com"
    )


def tell(*types: str, **payload: Any) -> None:
    with transaction.atomic():
        broadcast_many([Message(type, payload) for type in types])


class TestRateLimits:
    @pytest.mark.django_db(transaction=True)
    def test_a_busy_service(self) -> None:
        answers = [(429, {"Retry-After": "600"}), (200, {})]

        async def send(number: str, id: str) -> SimpleNamespace:
            status, headers = answers.pop(0)
            return SimpleNamespace(status=status, headers=headers)

        with story("guides/rate-limits.md", sms=SimpleNamespace(send=send)) as page:
            assert not find_errors(page.DJANGO_MQ)
            page.remind(["+49 1", "+49 2"])
            due()
            started = monotonic()
            assert drain(errors="keep").deliveries == 2
            assert monotonic() - started >= 1  # each keeps its place for a second
            [busy] = QueuedMessage.objects.all()
            assert (busy.attempts, busy.last_error) == (0, "Snooze: the SMS service is busy")
            assert busy.processable_after - timezone.now() > timedelta(minutes=9)

    def test_a_list_is_spread(self) -> None:
        with story("guides/rate-limits.md") as page:
            page.remind(["+49 1", "+49 2", "+49 3"])
        first, _, third = QueuedMessage.objects.order_by("pk")
        assert third.processable_after - first.processable_after == timedelta(seconds=0.4)


class TestIdempotency:
    @pytest.fixture
    def calls(self) -> list[Any]:
        return []

    @pytest.fixture
    def page(self, calls: list[Any]) -> Any:
        names = {
            "bank": SimpleNamespace(capture=lambda **call: calls.append(call)),
            "mail": lambda order: calls.append(order.pk),
            "search_index": SimpleNamespace(put=lambda *call: calls.append(call)),
        }
        with story("guides/idempotency.md", **names) as module:
            yield module

    def test_the_key_is_the_same_on_every_attempt(self, page: Any, calls: list[Any]) -> None:
        def capture(**call: Any) -> None:
            calls.append(call)
            if len(calls) == 1:
                raise TimeoutError

        page.bank.capture = capture
        tell("shop.orders.paid", order_id=7)
        assert len(drain(errors="keep")) == 1
        due()
        assert drain() == 1
        assert calls[0] == calls[1]
        assert calls[0]["order"] == 7

    def test_second_message_does_not_repeat_the_work(self, page: Any, calls: list[Any]) -> None:
        placed = order()
        tell("shop.orders.placed", order_id=placed.pk)
        assert drain("mail") == 1
        assert Order.objects.get().mailed_at <= timezone.now()
        tell("shop.orders.placed", order_id=placed.pk)
        assert drain("mail") == 1
        assert calls == [placed.pk]

    def test_the_others(self, page: Any, calls: list[Any]) -> None:
        placed = order()
        tell("shop.stock.changed", product_id=placed.product_id)
        tell("shop.orders.placed", order_id=placed.pk)
        drain("search")
        drain("invoices")
        drain("mail")
        put = (f"product-{placed.product_id}", {"name": "chair", "stock": 9})
        assert calls == [put, placed.pk]
        assert Invoice.objects.get().total == 40
        assert_broadcast("shop.invoices.written")


class TestFilesAndMails:
    @pytest.fixture
    def page(self, settings: Any) -> Any:
        settings.STORAGES = {**settings.STORAGES, **MEMORY}
        with story("guides/files-and-mails.md") as module:
            yield module

    def test_the_mail(self, page: Any) -> None:
        tell("shop.orders.placed", order_id=order().pk)
        assert drain() == 1
        assert mail.outbox[0].to == ["ada@example.com"]

    def test_a_bad_address_is_dead_at_once(
        self, page: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(letter: Any) -> None:
            raise page.SMTPRecipientsRefused({})

        monkeypatch.setattr(page.EmailMessage, "send", refuse)
        tell("shop.orders.placed", order_id=order().pk)
        drain()
        assert QueuedMessage.objects.get().dead_reason.startswith("no such mailbox")

    def test_a_row_never_lacks_its_file(self, page: Any) -> None:
        kept = page.upload(order(), ContentFile(b"one"))
        assert default_storage.exists(kept)
        assert_broadcast("shop.files.uploaded", times=1)
        lost = Order(pk=10**6)  # has no product, so the database refuses it
        with pytest.raises(Exception, match="not-null constraint"):
            page.upload(lost, ContentFile(b"two"))
        assert_broadcast("shop.files.uploaded", times=1)

    def test_a_file_is_deleted_after_the_commit(self, page: Any) -> None:
        placed = order()
        name = page.upload(placed, ContentFile(b"one"))
        page.remove(placed, name)
        assert default_storage.exists(name)
        drain("files")
        assert not default_storage.exists(name)

    def test_a_report(self, page: Any) -> None:
        placed = order()
        tell("shop.reports.wanted", user_id=3)
        drain("reports")
        written = QueuedMessage.objects.get(type="shop.reports.written")
        assert written.payload["for"] == 3
        assert default_storage.open(written.payload["file"]).read() == f"{placed.pk};2\n".encode()


def test_ordering() -> None:
    with story("guides/ordering.md") as page:
        page.transfer("a", "b", 5)
        page.transfer("b", "a", 2)
        assert drain() == 4
        assert page.balance == {"a": [-5, 2], "b": [5, -2]}
        product = order().product
        page.take_from_stock(product.pk, 4)
        payload = {"product_id": product.pk, "left": 5}
        assert_broadcast("shop.stock.changed", payload=payload, times=1)
        assert not find_errors(page.DJANGO_MQ)


class TestSteps:
    @pytest.fixture
    def written(self) -> list[Any]:
        return []

    @pytest.fixture
    def page(self, written: list[Any], settings: Any) -> Iterator[Any]:
        settings.ADMINS = [("Ada", "ada@example.com")]
        names = {"write_file": written.append, "export_order": written.append}
        with story("guides/steps.md", **names) as module:
            yield module

    def test_one_after_the_other(self, page: Any) -> None:
        placed = order()
        tell("shop.orders.placed", order_id=placed.pk)
        assert drain("invoices") == drain("warehouse") == 1
        assert Order.objects.get().status == Order.Status.PACKED
        assert Invoice.objects.get().order_id == placed.pk

    def test_parts_that_are_joined(self, page: Any, written: list[Any]) -> None:
        export = page.start_export(2026)
        assert drain("exports") == 12
        assert [part["month"] for part in written] == list(range(1, 13))
        assert_broadcast("shop.exports.complete", payload={"export": export.pk}, times=1)
        due()
        drain("checks")
        assert not mail.outbox
        assert_broadcast("shop.exports.check", times=0)

    def test_the_check_waits_while_parts_wait(self, page: Any, written: list[Any]) -> None:
        page.start_export(2026)
        due()
        drain("checks")
        check = QueuedMessage.objects.get(type="shop.exports.check")
        assert (check.state, check.attempts) == ("delayed", 0)
        drain("exports")
        due()
        drain("checks")
        assert not mail.outbox
        assert_broadcast("shop.exports.check", times=0)

    def test_an_export_that_is_cancelled(self, page: Any, written: list[Any]) -> None:
        page.start_export(2026)
        Export.objects.update(cancelled=True)
        assert drain("exports") == 12
        assert not written

    def test_a_part_that_fails_is_noticed_and_counts_once_it_succeeds(self, page: Any) -> None:
        def fail(part: dict[str, int]) -> None:
            if part["month"] == 7:
                raise Reject("no disk")

        page.write_file = fail
        page.start_export(2026)
        drain("exports", errors="keep")
        assert_broadcast("shop.exports.complete", times=0)
        due()
        drain("exports")
        assert not mail.outbox
        drain("checks")
        assert mail.outbox[0].subject.endswith("An export is incomplete")
        assert mail.outbox[0].body.endswith("; dead parts: 1")
        page.write_file = lambda part: None
        queues.requeue(ids=[QueuedMessage.objects.dead().get().pk])
        drain("exports")
        assert_broadcast("shop.exports.complete", times=1)

    def test_parts_that_are_counted_in_lists(self, page: Any, written: list[Any]) -> None:
        one, two = Export.objects.create(parts=3), Export.objects.create(parts=2)
        for pk in (one.pk, two.pk, one.pk, two.pk, one.pk):
            tell("shop.exports.row", export=pk, order_id=7)
        assert drain("exports") == drain("counts") == len(written) == 5
        for export in (one, two):
            assert_broadcast("shop.exports.complete", payload={"export": export.pk}, times=1)

    def test_step_that_cannot_go_on_triggers_a_refund(self, page: Any) -> None:
        fits, too_many = order(quantity=9), order(quantity=10)
        for placed in (too_many, fits):
            tell("shop.orders.paid", order_id=placed.pk)
        assert drain("stock") == 2
        assert Product.objects.get().stock == 0
        assert_broadcast("shop.payments.refund", payload={"order_id": too_many.pk}, times=1)
        assert Order.objects.get(status=Order.Status.CANCELLED) == too_many

    def test_a_decision_cancels_its_deadline(self, page: Any) -> None:
        first, second = order(), order()
        page.ask_for_approval(first)
        page.ask_for_approval(second)
        page.approve(first)
        assert_broadcast("shop.approvals.overdue", payload={"order_id": second.pk}, times=1)
        assert_broadcast("shop.orders.approved", payload={"order_id": first.pk}, times=1)


def test_dedupe() -> None:
    with story("guides/dedupe.md") as page:
        assert page.request_export(7)
        assert not page.request_export(7)
        page.product_changed(1)
        page.product_changed(1)
        page.draft_edited(1)
        before = QueuedMessage.objects.get(type="shop.drafts.edited").processable_after
        page.draft_edited(1)
        draft = QueuedMessage.objects.get(type="shop.drafts.edited")
        assert draft.processable_after >= before
        assert page.webhook({"id": "evt_1", "kind": "paid"}) == "added"
        assert page.webhook({"id": "evt_1", "kind": "paid"}) == "duplicate"
        assert QueuedMessage.objects.count() == 4
        assert len(page.unsubscribe(7)) == 1
        assert page.request_export(7)


def test_an_edit_while_the_handler_runs_gets_a_run_of_its_own() -> None:
    runs: list[int] = []
    with story("guides/dedupe.md") as page:

        @handler("shop.drafts.edited", name="shop.drafts")
        def look(delivery: Delivery) -> None:
            runs.append(delivery.id)
            if len(runs) == 1:
                page.draft_edited(1)
                page.draft_edited(1)

        handler("shop.drafts.edited", name="shop.index", queue="index")(lambda delivery: None)
        page.draft_edited(1)
        due(queue="default")
        assert drain("default") == 1  # the other copy still waits
        assert {each.state for each in QueuedMessage.objects.all()} == {"delayed"}
        due()
        assert drain() == 2
    assert not QueuedMessage.objects.exists()
    assert len(set(runs)) == 2


def test_fan_out() -> None:
    with story("guides/fan-out.md", PART=2) as page:
        orders = [order(name=f"{n}") for n in range(5)]
        assert page.announce("news") == 5
        assert not QueuedMessage.objects.exclude(priority=-10).exists()
        QueuedMessage.objects.all().delete()
        page.PART = 2
        page.start_newsletter(5, "more news")
        page.start_newsletter(5, "more news")
        assert drain() == 3  # the letters have no handler: they are held
        letters = QueuedMessage.objects.filter(type="shop.letters.due")
        assert sorted(letter.payload["order_id"] for letter in letters) == [o.pk for o in orders]
        page.start_newsletter(5, "more news")
        assert drain() == 0, "after the last part, too"
        for placed in orders[:3]:
            tell("shop.products.viewed", product_id=placed.product_id)
        drain("statistics")
        assert list(Product.objects.order_by("pk").values_list("stock", flat=True)) == [
            *(8, 8, 8),
            *(9, 9),
        ]
        assert not find_errors(page.DJANGO_MQ)


def test_multi_tenant() -> None:
    with story("guides/multi-tenant.md", env=lambda name, default: default) as page:
        with transaction.atomic(), page.acting_for("acme"):
            page.tell("shop.orders.placed", {"order_id": 1})
            page.tell("shop.orders.counted", {})
            page.want_report("acme")
        with transaction.atomic(), page.acting_for("tiny"):
            page.tell("shop.orders.counted", {})
            page.want_report("tiny")
        with transaction.atomic(), page.acting_for("late"):
            page.tell("shop.orders.exported", {})
        drain()
        assert ("acme", 1) in page.seen
        assert ("reports.acme", {"for": "acme"}) in page.seen
        assert ("reports", {"for": "tiny"}) in page.seen
        assert "acme, public" in page.seen
        assert "tiny, public" in page.seen
        assert "late, public" in page.seen
        written = QueuedMessage.objects.get(type="shop.invoices.written")
        assert written.metadata["tenant"] == "acme"


def test_tenants_take_turns() -> None:
    with story("guides/multi-tenant.md", env=lambda name, default: default) as page:
        for name in ("big", "big", "big", "tiny", "tiny"):
            with page.acting_for(name):
                page.want_export(name)
        drain("exports")
        assert page.seen == ["big", "tiny", "big", "tiny", "big"]


CASES = {"PlaceOrderTest": 2, "TooManyTest": 2, "BroadcastTest": 1}


@pytest.mark.parametrize(("case", "tests"), CASES.items())
def test_testing(case: str, tests: int) -> None:
    with story("guides/testing.md") as page:
        assert passes(getattr(page, case)) == tests
