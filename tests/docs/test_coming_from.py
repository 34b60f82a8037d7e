"""docs/coming-from/: our side of each pair of snippets runs; the other side is valid Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import transaction
from django.utils.module_loading import import_string

from django_mq import broadcast
from django_mq.models import QueuedMessage
from django_mq.testing import assert_broadcast, deliver, drain, due
from testproject.shop.models import Invoice, Order, Product
from tests.docs.pages import DOCS, namespace, story
from tests.test_docs import snippets

pytestmark = pytest.mark.django_db

#: Snippets of other packages are marked `py`: they are parsed, not run.
OTHERS = {
    f"{page.name}-{number}": code
    for page in sorted(DOCS.glob("coming-from/*.md"))
    for number, code in enumerate(snippets(page, "py"))
}


@pytest.fixture
def order() -> Order:
    product = Product.objects.create(name="chair", price=20, stock=9)
    return Order(product=product, price=20, quantity=2, email="ada@example.com")


@pytest.mark.parametrize("code", OTHERS.values(), ids=OTHERS)
def test_the_other_side_is_python(code: str) -> None:
    assert ast.parse(code).body


class Busy(Exception):
    pass


class Refused(Exception):
    pass


def test_the_recipes_for_all() -> None:
    """Some exceptions end a message, and a decorator acts around a handler or in its place."""
    outcomes: dict[int, Any] = {1: None, 2: Refused("card 4711"), 3: Busy("line 7")}

    def capture(order_id: int) -> None:
        if outcomes[order_id]:
            raise outcomes[order_id]

    users: list[str] = []
    sent: list[int] = []

    @contextmanager
    def log_context(user: str) -> Iterator[None]:
        users.append(user)
        yield

    bank = SimpleNamespace(Refused=Refused, Busy=Busy, capture=capture)
    names = {"bank": bank, "blocked": {"eve"}, "log_context": log_context, "mail": sent.append}
    with story("coming-from/index.md", **names):
        with transaction.atomic():
            for order_id in outcomes:
                broadcast("shop.orders.paid", {"order_id": order_id})
            for user in ("ada", "eve"):
                broadcast("shop.orders.placed", {"order_id": 4}, metadata={"user": user})
        assert drain() == 5
        assert (users, sent) == (["ada"], [4])
        left = {row.payload["order_id"]: row for row in QueuedMessage.objects.with_state()}
        assert (left[2].state, left[2].dead_reason) == ("dead", "the bank refused the card")
        assert (left[3].state, left[3].attempts) == ("retrying", 1)
        assert len(left) == 2


def test_celery(order: Order) -> None:
    calls: list[int] = []

    def capture(order_id: int) -> None:
        calls.append(order_id)
        if len(calls) == 1:
            raise Busy

    bank = SimpleNamespace(Busy=Busy, capture=capture)
    reports: list[str] = []
    task = SimpleNamespace(enqueue=lambda: reports.append("report"))
    tasks = {"shop.tasks": namespace("shop.tasks", report=task)}
    with story("coming-from/celery.md", tasks, bank=bank) as page:
        deliver(page.weekly)
        assert reports == ["report"]
        page.pay(order)
        assert drain() == 1  # a Retry is not a failure
        due()
        assert drain() == 1
        assert calls == [order.pk, order.pk]


def test_procrastinate(order: Order) -> None:
    with story("coming-from/procrastinate.md") as page:
        page.place_order(order)
        assert QueuedMessage.objects.get().key == f"order/{order.pk}"
        assert drain() == 1
        assert Invoice.objects.get().total == 40


@pytest.mark.parametrize("other", ["dramatiq", "huey", "rq"])
def test_a_mail(other: str, order: Order) -> None:
    sent: list[Any] = []
    with story(f"coming-from/{other}.md", mail=sent.append) as page:
        page.place_order(order)
        assert drain() == 1
        assert sent == [order.pk]


def test_django_q2(order: Order) -> None:
    with story("coming-from/django-q2.md") as page:
        page.place_order(order)
        assert drain("invoices") == 1
        assert_broadcast("shop.invoices.written", times=1)


def test_django_tasks_db() -> None:
    with story("coming-from/django-tasks-db.md") as page:
        backend = import_string(page.TASKS["default"]["BACKEND"])
        assert not list(backend("default", page.TASKS["default"]).check())


def test_the_old_backend_takes_the_queues_of_its_waiting_tasks() -> None:
    """It refuses a task whose queue it does not list, and its worker serves `default` alone."""
    page = DOCS / "coming-from/django-tasks-db.md"
    [moved] = [code for code in snippets(page, "py") if '"old"' in code and "TASKS" in code]
    backends = ast.literal_eval(moved.removeprefix("TASKS = "))
    assert backends["old"]["QUEUES"] == backends["default"]["QUEUES"]
    [command] = snippets(page, "console")
    assert "--backend old --queue-name '*'" in command
