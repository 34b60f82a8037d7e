"""docs/coming-from/: our side of each pair of snippets runs; the other side is valid Python."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from django_mq import broadcast
from django_mq.models import QueuedMessage
from django_mq.testing import assert_broadcast, deliver, drain, due
from testproject.shop.models import Invoice, Order, Product
from tests.docs.pages import DOCS, namespace, story
from tests.test_docs import snippets

pytestmark = pytest.mark.django_db

PROCRASTINATE = DOCS / "coming-from/procrastinate.md"

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


def test_delayed_jobs_of_procrastinate_move(monkeypatch: pytest.MonkeyPatch) -> None:
    due_at = timezone.now() + timedelta(days=3)
    jobs = [
        SimpleNamespace(pk=1, args={"order_id": 1}, scheduled_at=None, lock=None),
        SimpleNamespace(pk=2, args={"order_id": 2}, scheduled_at=due_at, lock="order/2"),
        SimpleNamespace(pk=3, args={"order_id": 3}, scheduled_at=due_at, lock=None),
    ]
    chosen = SimpleNamespace(order_by=lambda field: jobs)
    model = SimpleNamespace(objects=SimpleNamespace(filter=lambda *, task_name, status: chosen))
    manager = SimpleNamespace(cancel_job_by_id=lambda pk: pk < 3)
    package = namespace("procrastinate.contrib.django", app=SimpleNamespace(job_manager=manager))
    models = namespace("procrastinate.contrib.django.models", ProcrastinateJob=model)
    for name in ("procrastinate", "procrastinate.contrib"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (package, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    [code] = [each for each in snippets(PROCRASTINATE, "py") if "cancel_job_by_id" in each]
    exec(compile(code, "procrastinate.md", "exec"), {})  # noqa: S102
    first, second = QueuedMessage.objects.order_by("id")
    assert (first.payload, first.key) == ({"order_id": 1}, None)
    assert first.processable_after < due_at
    assert (second.payload, second.key) == ({"order_id": 2}, "order/2")
    assert second.processable_after == due_at


def test_the_tables_of_procrastinate_are_dropped() -> None:
    """Tables with columns of its types, and functions and triggers that depend on both."""
    tables = ("jobs", "events", "periodic_defers", "workers")
    types = ("job_status", "job_event_type", "job_to_defer_v1")
    [statements] = snippets(PROCRASTINATE, "postgresql")
    with connection.cursor() as cursor:
        for each in types:
            cursor.execute(f"create type procrastinate_{each} as enum ('todo')")
        for each in tables:
            cursor.execute(f"create table procrastinate_{each} (status procrastinate_job_status)")
        cursor.execute(
            "create function procrastinate_fetch_job_v2(integer) returns procrastinate_jobs"
            " language sql as 'select * from procrastinate_jobs'"
        )
        cursor.execute(
            "create function procrastinate_notify_v1() returns trigger"
            " language plpgsql as 'begin return new; end'"
        )
        cursor.execute(
            "create trigger notify before insert on procrastinate_jobs"
            " for each row execute function procrastinate_notify_v1()"
        )
        cursor.execute(statements.removeprefix("begin;").replace("commit;", ""))
        cursor.execute(
            "select relname from pg_class where relname like 'procrastinate%'"
            " union select typname from pg_type where typname like 'procrastinate%'"
            " union select proname from pg_proc where proname like 'procrastinate%'"
        )
        assert cursor.fetchall() == []


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
