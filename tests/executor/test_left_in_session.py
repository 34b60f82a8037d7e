"""Session state that a handler leaves, other than settings, does not reach the next slice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction
from psycopg.rows import dict_row

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.signals import message_started
from testproject.shop.models import Product
from tests.database import second_connection
from tests.executor.nonatomic.conftest import NonAtomicBench, nonatomic  # noqa: F401  (a fixture)
from tests.rows import add
from tests.slow import mostly_slow
from tests.worker.conftest import BENCHES, Bench, add_many, mostly_fresh, waiting

pytestmark = pytest.mark.django_db(transaction=True)

LEAVE = {
    "lock": "select pg_advisory_lock(7)",
    "table": "create temporary table left_behind as select 1",
    "cursor": "declare left_behind cursor with hold for select 1",
    "listen": "listen left_behind",
}
SEEN = """
select pg_backend_pid(),
       array(select objid::int
               from pg_locks
              where locktype = 'advisory' and pid = pg_backend_pid()),
       to_regclass('pg_temp.left_behind'),
       array(select name from pg_cursors where name = 'left_behind'),
       array(select pg_listening_channels())
"""
NOTHING = ([], None, [], [])


def run(sql: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone() if cursor.description else None


@pytest.mark.parametrize(
    ("left", "fails", "make_bench"),
    mostly_slow([*LEAVE], [False, True], BENCHES),
    indirect=["make_bench"],
)
def test_a_slice_leaves_its_session_clean(bench: Bench, left: str, fails: bool) -> None:
    """A session lock is not released by a rollback."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        seen.append(run(SEEN))
        run(LEAVE[left])
        if fails:
            raise ValueError

    for _ in range(3):
        add(handler="h")
        bench.run_all(bench.claim())
    assert len({each[0] for each in seen}) == 1  # a single session
    assert [each[1:] for each in seen] == [NOTHING] * 3


@pytest.mark.parametrize("statement", LEAVE.values(), ids=LEAVE)
def test_a_hook_leaves_its_session_clean(bench: Bench, statement: str) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(run(SEEN) if seen else (0, *NOTHING))
        transaction.on_commit(lambda: run(statement))

    for _ in range(2):
        add(handler="h")
        bench.run_all(bench.claim())
    assert [each[1:] for each in seen] == [NOTHING] * 2


@pytest.mark.parametrize("statement", LEAVE.values(), ids=LEAVE)
def test_a_handler_outside_a_transaction_leaves_its_session_clean(
    nonatomic: NonAtomicBench,  # noqa: F811
    statement: str,
) -> None:
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        seen.append(run(SEEN))
        run(statement)

    for _ in range(2):
        add(handler="h")
        nonatomic.go()
    assert len({each[0] for each in seen}) == 1
    assert [each[1:] for each in seen] == [NOTHING] * 2


def test_a_receiver_leaves_the_session_clean_for_the_next_handler(
    nonatomic: NonAtomicBench,  # noqa: F811
) -> None:
    """Even if the handler between them does not use its connection."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        if delivery.payload == "looks":
            seen.append(run(SEEN))

    def receive(delivery: Delivery, **given: Any) -> None:
        if delivery.payload == "leaves":
            run(LEAVE["lock"])

    message_started.connect(receive)
    try:
        for payload in ("connects", "leaves", "looks"):
            add(handler="h", payload=payload)
            nonatomic.go()
    finally:
        message_started.disconnect(receive)
    assert [each[1:] for each in seen] == [NOTHING]


def test_a_session_lock_is_held_until_the_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may protect the handler's writes until others can see them."""
    free: list[Any] = []

    def ask() -> None:
        with second_connection() as other:
            free.append(other.execute("select pg_try_advisory_xact_lock(7)").fetchone())

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        run("select pg_advisory_lock(7)")

    commit = bench.wrapper.commit

    def watched() -> None:
        ask()
        commit()

    monkeypatch.setattr(bench.wrapper, "commit", watched)
    add(handler="h")
    bench.run_all(bench.claim())
    ask()
    assert free == [(False,), (True,)]


def test_a_slice_that_used_nothing_sends_nothing_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr("django_mq.executor.session.simple_query", lambda _, sql: sent.append(sql))

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if uses:
            run("select 1")

    for uses in (False, True):
        add_many(5, handler="h")
        bench.run_all(bench.claim())
        assert len(sent) == uses  # once per slice
    assert waiting() == set()


@pytest.mark.parametrize("statement", [LEAVE["table"], LEAVE["cursor"]], ids=["table", "cursor"])
def test_each_message_of_a_slice_may_use_the_same_names(bench: Bench, statement: str) -> None:
    """Otherwise a handler works until a second message of it is in the slice."""
    seen: list[Any] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        seen.append(run(SEEN)[1:])
        run(statement)
        run("declare unfinished cursor for select 1")

    add_many(3, handler="h")
    bench.run_all(bench.claim())
    assert waiting() == set()
    assert seen == [NOTHING] * 3
    assert len(bench.runs) == 1


def left_in_a_cycle() -> None:
    """Begin an iteration that nothing ends before the garbage collection."""
    products = Product.objects.iterator(chunk_size=1)
    next(products)
    cycle: list[Any] = [products]
    cycle.append(cycle)


@pytest.fixture
def collected_by_hand(transactional_db: None) -> Iterator[None]:
    Product.objects.bulk_create(Product(name=name, price=1) for name in "abc")
    gc.disable()
    yield
    gc.enable()


def collect_in_transaction(delivery: Delivery) -> None:
    """Collect the garbage while a transaction is open, and go on in it."""
    with transaction.atomic():
        Product.objects.count()
        gc.collect()
        Product.objects.count()


@mostly_fresh
@pytest.mark.parametrize("how", ["acked", "failed", "hook"])
def test_an_iterator_of_an_earlier_slice_does_not_abort_a_transaction(
    bench: Bench, collected_by_hand: None, how: str
) -> None:
    """It would close a cursor that is no longer there."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        if delivery.payload == "collects":
            collect_in_transaction(delivery)
            return
        if how == "hook":
            transaction.on_commit(left_in_a_cycle)
        else:
            left_in_a_cycle()
        if how == "failed":
            raise ValueError

    leaves, collects = add(handler="h"), add(handler="h", payload="collects")
    tasks = bench.claim()
    bench.run_all(tasks[:1])
    bench.run_all(tasks[1:])
    assert collects.pk not in waiting()
    assert (leaves.pk in waiting()) is (how == "failed")


def test_an_iterator_of_a_handler_outside_a_transaction_aborts_no_other(
    nonatomic: NonAtomicBench,  # noqa: F811
    collected_by_hand: None,
) -> None:
    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        if delivery.payload == "collects":
            collect_in_transaction(delivery)
        else:
            left_in_a_cycle()

    for payload in ("leaves", "collects"):
        add(handler="h", payload=payload)
        nonatomic.go()
    assert waiting() == set()


def read_dicts() -> None:
    connection.connection.row_factory = dict_row


def read_only() -> None:
    connection.connection.read_only = True


@pytest.mark.parametrize("fails", [False, True], ids=["acked", "failed"])
def test_the_rows_of_the_next_message_are_djangos(bench: Bench, fails: bool) -> None:
    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(600)))
    def h(delivery: Delivery) -> None:
        assert run("select 1") == (1,)
        if delivery.payload == "changes":
            read_dicts()
            if fails:
                raise ValueError

    messages = [add(handler="h", payload="changes"), add(handler="h")]
    bench.run_all(bench.claim())
    assert waiting() == ({messages[0].pk} if fails else set())


@pytest.mark.parametrize("change", [read_dicts, read_only])
def test_a_hook_leaves_the_drivers_options_as_they_were(
    bench: Bench, change: Callable[[], None]
) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert run("show transaction_read_only") == ("off",)
        if delivery.payload == "changes":
            transaction.on_commit(change)

    for payload in ("changes", "follows"):
        add(handler="h", payload=payload)
    tasks = bench.claim()
    bench.run_all(tasks[:1])
    bench.run_all(tasks[1:])
    assert waiting() == set()


@pytest.mark.parametrize("change", [read_dicts, read_only])
def test_a_handler_outside_a_transaction_leaves_the_drivers_options_as_they_were(
    nonatomic: NonAtomicBench,  # noqa: F811
    change: Callable[[], None],
) -> None:
    @handler("#", queue="mail", name="h", atomic=False)
    def h(delivery: Any) -> None:
        with transaction.atomic():
            assert run("show transaction_read_only") == ("off",)
        change()

    for _ in range(2):
        add(handler="h")
        nonatomic.go()
    assert waiting() == set()
