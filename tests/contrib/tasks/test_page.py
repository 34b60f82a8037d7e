"""The snippets of docs/tasks.md run in order, as one story."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from io import StringIO
from types import ModuleType
from typing import Any

import django
import pytest
from django.core.management import call_command

from django_mq import DuplicateMessage, RetryPolicy, exponential, handlers
from django_mq.checks import check_schedules
from django_mq.contrib.tasks import TaskCancelled
from django_mq.contrib.tasks.compat import task_backends
from django_mq.models import QueuedMessage
from django_mq.testing import drain, due
from testproject.shop.models import Invoice, Order, Product
from tests.contrib.tasks.conftest import BACKEND
from tests.docs.pages import passes
from tests.test_docs import ROOT, snippets

PAGE = ROOT / "docs/tasks.md"


@pytest.fixture
def story(settings: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the snippets define, run one after another as a module `shop.tasks`."""
    module = ModuleType("shop.tasks")
    monkeypatch.setitem(sys.modules, "shop", sys.modules["testproject.shop"])
    monkeypatch.setitem(sys.modules, "shop.models", sys.modules["testproject.shop.models"])
    monkeypatch.setitem(sys.modules, "shop.tasks", module)
    first, *others = snippets(PAGE, "python")
    exec(first, vars(module))  # noqa: S102
    settings.TASKS = module.TASKS
    for code in others:
        if django.VERSION < (6, 0):
            code = code.replace("from django.tasks", "from django_tasks")
        exec(compile(code, "tasks.md", "exec"), vars(module))  # noqa: S102
    return vars(module)


@pytest.mark.django_db
def test_the_test_of_the_page_passes(story: dict[str, Any]) -> None:
    assert passes(story["PlaceOrderTest"]) == 2


@pytest.mark.django_db
def test_the_options_of_the_page(story: dict[str, Any]) -> None:
    class AnOrder:
        pk = 7

    first, second = story["remind"](AnOrder), story["remind"](AnOrder)
    assert first.id == second.id
    story["post"].enqueue("a", 5)
    receipt, posted = QueuedMessage.objects.order_by("id")
    policy = RetryPolicy(max_attempts=5, backoff=exponential(base=10))
    assert (receipt.queue, receipt.unique_id) == ("mail", "receipt-7")
    assert (receipt.max_attempts, receipt.retry) == (5, None)  # those of the declared task
    registered = handlers.get(receipt.handler)
    assert registered is not None
    assert registered.retry == policy
    assert receipt.expires_at is not None
    assert (posted.key, posted.max_attempts) == ("account/a", 1)
    with pytest.raises(DuplicateMessage):
        story["send_receipt"].using(unique_id="receipt-7", on_duplicate="raise").enqueue(7)


@pytest.mark.django_db
def test_the_cancelled_task(story: dict[str, Any]) -> None:
    result = story["write_invoice"].enqueue(7)
    assert story["cancel_invoice"](result.id)
    assert not story["cancel_invoice"](result.id)
    result.refresh()
    assert [each.exception_class for each in result.errors] == [TaskCancelled]


@pytest.mark.django_db
def test_the_renamed_task(story: dict[str, Any]) -> None:
    """Messages of the old name run, and the command of the page counts those that are left."""

    def left() -> str:
        [command] = re.findall(r"manage\.py (mq_purge .*--dry-run)", PAGE.read_text())
        out = StringIO()
        call_command(*command.split(), stdout=out)
        return out.getvalue()

    product = Product.objects.create(name="chair", price=20, stock=1)
    order = Order.objects.create(product=product, price=20, quantity=2, email="ada@example.com")
    result = story["create_invoice"].enqueue(order.pk)
    assert "remove 1 " in left()
    drain()
    assert "remove 0 " in left()
    result.refresh()
    assert result.return_value == Invoice.objects.get(order=order).pk


@pytest.mark.django_db
def test_the_task_by_the_clock(story: dict[str, Any]) -> None:
    product = Product.objects.create(name="chair", price=20, stock=1)
    Order.objects.create(product=product, price=20, quantity=2, email="ada@example.com")
    assert not check_schedules(None)
    due(until=timedelta(days=1))
    assert drain() == 2  # the handler, and the task that it enqueued
    assert Invoice.objects.get().total == 40


def test_the_settings_of_the_page(story: dict[str, Any]) -> None:
    assert story["TASKS"]["default"]["BACKEND"] == BACKEND
    assert task_backends["default"].check() == []
