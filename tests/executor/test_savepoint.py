"""The savepoint of a handler opens with the first use of the connection."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import psycopg
import pytest
from django.db import (
    connection,
    transaction,
)

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor import attempts, slice_body
from django_mq.messages import Delivery
from django_mq.store import settle
from testproject.shop.models import Product
from tests.rows import add
from tests.worker.conftest import (
    Bench,
    add_many,
    effect,
    effects,
    mostly_fresh,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def statements(bench: Bench) -> list[str]:
    """The statements that reach the server through the savepoint's own cursor."""
    seen: list[str] = []
    original = psycopg.ClientCursor.execute

    def execute(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        text = query if isinstance(query, str | bytes) else query.as_string(None)
        seen.append(text.decode() if isinstance(text, bytes) else text)
        return original(self, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.ClientCursor, "execute", execute)
        yield seen


KEPT: list[Any] = []  # a cursor of an earlier delivery, which a module may keep
TOUCHES: dict[str, Callable[[], Any]] = {
    "kept_cursor": lambda: KEPT.pop().execute("select 1"),
    "cursor": lambda: connection.cursor(),
    "chunked_cursor": lambda: connection.chunked_cursor(),
    "orm": lambda: Product.objects.count(),
    "iterator": lambda: list(Product.objects.iterator(chunk_size=2)),
    "driver": lambda: connection.connection,
    "atomic": lambda: transaction.atomic().__enter__() and None,
    "ensure_connection": lambda: connection.ensure_connection(),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_the_savepoint_opens_with_the_first_touch(
    bench: Bench, statements: list[str], touch: str
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if touch == "atomic":
            with transaction.atomic():
                pass
        else:
            TOUCHES[touch]()

    connection.ensure_connection()
    KEPT[:] = [connection.cursor()]
    add(handler="h")
    bench.run_all(bench.claim())
    assert sum("django_mq_delivery" in s for s in statements) == 1


def test_a_handler_that_touches_nothing_opens_none(bench: Bench, statements: list[str]) -> None:
    """5 us against 145 us."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert delivery.payload == {}
        transaction.on_commit(lambda: None)
        assert connection.in_atomic_block
        if delivery.id % 2:
            raise ValueError

    add_many(4, handler="h")
    bench.run_all(bench.claim())
    assert not any("savepoint" in s.lower() for s in statements)


@mostly_fresh
@pytest.mark.parametrize("touch", [*TOUCHES, None])
def test_the_session_is_taken_back_after_hooks_that_used_it(
    bench: Bench, statements: list[str], touch: str | None
) -> None:
    """Only then: otherwise it would cost each slice a tenth of its time."""
    do = TOUCHES.get(touch or "", lambda: None)
    hooks: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        transaction.on_commit(do)
        transaction.on_commit(lambda: hooks.append("the next one runs too"))

    connection.ensure_connection()
    KEPT[:] = [connection.cursor()]
    add(handler="h")
    bench.run_all(bench.claim())
    assert len(hooks) == 1
    assert any("reset all" in s for s in statements) == (touch is not None)


def test_a_handler_after_a_writer_finds_its_savepoint_open(
    bench: Bench, statements: list[str]
) -> None:
    """It saves a round trip each; and only its own writes are undone, as usual."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload != "reads nothing":
            effect(delivery)
        if delivery.payload == "fails":
            raise ValueError

    payloads = ["writes", "writes", "reads nothing", "fails", "reads nothing", "writes"]
    messages = [add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(payloads)]
    bench.run_all(bench.claim())
    assert effects() == {messages[place].pk for place in (0, 1, 5)}
    assert waiting() == {messages[3].pk}
    ends = [text for text in statements if "django_mq_delivery" in text]
    opened = [text.endswith("; savepoint django_mq_delivery") for text in ends]
    assert opened == [True, True, False, False]  # the failure's end opens none, nor the last


def limit_savepoints(monkeypatch: pytest.MonkeyPatch, maximum: int) -> None:
    for module in (slice_body, attempts):
        monkeypatch.setattr(module, "MAX_SAVEPOINTS", maximum)


@pytest.mark.parametrize("fails", [False, True])
def test_atomic_blocks_of_handlers_count_as_savepoints_of_their_slice(
    bench: Bench, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL caches 64 subtransactions, whoever opens them."""
    limit_savepoints(monkeypatch, 8)
    transactions: list[int] = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        for part in "ab":
            with transaction.atomic():
                Product.objects.create(name=f"{part} {delivery.id}", price=1)
        with connection.cursor() as cursor:
            cursor.execute("select pg_current_xact_id()::text::bigint")
            transactions.append(cursor.fetchone()[0])
        if fails:
            raise ValueError

    for n in range(7):
        add(handler="h", after=-60 + n)
    rows = bench.claim()
    while rows:
        rows = bench.run(rows).left
    assert [len(list(group)) for _, group in groupby(transactions)] == [3, 3, 1]


def test_a_handler_that_resets_the_count_of_blocks_lengthens_no_slice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_savepoints(monkeypatch, 4)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        effect(delivery)
        if delivery.payload == "resets":
            transaction.clean_savepoints()
            return
        for _ in range(2):
            with transaction.atomic():
                pass

    for n in range(6):
        add(handler="h", after=-60 + n, payload="resets" if n % 2 else "opens")
    rows = bench.claim()
    assert len(bench.run(rows).left) == 4


@pytest.mark.parametrize("last", ["writes", "reads nothing", "fails"])
def test_a_settle_is_not_in_a_savepoint(
    bench: Bench, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows locked by a transaction and removed by its subtransaction cost a multixact per slice."""
    limit_savepoints(monkeypatch, 4)

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        if delivery.payload != "reads nothing":
            effect(delivery)
        if delivery.payload == "fails":
            raise ValueError

    removed: list[tuple[int, int]] = []
    ack = settle.ack

    def watching(cursor: Any, fences: Any) -> Any:
        cursor.execute("select pg_current_xact_id()::text::bigint")
        (top,) = cursor.fetchone()
        found = ack(cursor, fences)
        cursor.execute(
            "insert into shop_product (name, price, stock) values (%s, 1, 0)"
            " returning xmin::text::bigint",
            [f"settled {len(removed)}"],
        )
        removed.append((top % 2**32, cursor.fetchone()[0]))
        return found

    monkeypatch.setattr(settle, "ack", watching)
    for n in range(9):
        add(handler="h", payload=last if n % 3 == 2 else "writes", after=-60 + n)
    rows = bench.claim()
    while rows:
        rows = bench.run(rows).left
    assert removed
    assert all(top == own for top, own in removed)


def test_a_failed_handlers_writes_through_the_driver_are_undone(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        connection.connection.execute(
            "insert into shop_product (name, price, stock) values (%s, 1, 0)",
            [f"message {delivery.id}"],
        )
        if delivery.payload == "bad":
            raise ValueError

    good, bad = (add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(["a", "bad"]))
    bench.run_all(bench.claim())
    assert effects() == {good.pk}
    assert waiting() == {bad.pk}


def test_watching_the_connection_leaves_no_savepoint_to_release(
    bench: Bench, statements: list[str]
) -> None:
    """Hooks and receivers run outside any transaction."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        Product.objects.count()

    add(handler="h")
    bench.run_all(bench.claim())
    statements.clear()
    bench.session.savepoint.watch()
    bench.session.savepoint.leave()
    assert statements == []
