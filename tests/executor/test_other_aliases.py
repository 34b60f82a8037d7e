"""A handler that leaves something on another alias fails; its neighbours do not meet it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql.base import DatabaseWrapper
from django.db.backends.sqlite3.base import DatabaseWrapper as SQLite
from psycopg.pq import TransactionStatus

from django_mq import RetryPolicy, fixed, handler
from django_mq.executor import thread_connections
from django_mq.executor.connections import reset_session
from django_mq.messages import Delivery
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.signals import message_acked, message_started
from django_mq.worker import Worker
from testproject.shop.models import Product
from tests.other_alias import _other_alias  # noqa: F401  (fixture)
from tests.rows import add
from tests.slow import mostly_slow
from tests.worker.conftest import registry  # noqa: F401  (fixture)

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


KEPT = ("closed between", "kept")


@pytest.fixture(params=KEPT)
def _other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        connections.settings["other"], "CONN_MAX_AGE", 600 if request.param == "kept" else 0
    )


def raw_begin() -> None:
    with connections["other"].cursor() as cursor:
        cursor.execute("begin")
        cursor.execute("select 1")


def block_left_open() -> None:
    transaction.atomic(using="other").__enter__()


def autocommit_off() -> None:
    connections["other"].set_autocommit(False)


def pipeline_left_open() -> None:
    connections["other"].ensure_connection()
    pipeline = connections["other"].connection.pipeline()
    pipeline.__enter__()
    kept.append(pipeline)


#: The collector would close these.
kept: list[object] = []


def write(number: int) -> None:
    Product.objects.using("other").create(name=f"{number}", price=1)


@pytest.mark.parametrize(
    ("leave", "kind", "_other"),
    mostly_slow(
        [raw_begin, block_left_open, autocommit_off, pipeline_left_open],
        ["atomic", "not atomic", "batch"],
        KEPT,
    ),
    indirect=["_other"],
)
def test_a_transaction_left_open_is_rolled_back(
    leave: Callable[[], None], kind: str, _other: None
) -> None:
    options = {"atomic": {}, "not atomic": {"atomic": False}, "batch": {"batch": True}}[kind]
    policy = RetryPolicy(max_attempts=2, backoff=fixed(0.1))

    @handler("#", queue="mail", name="h", retry=policy, **options)
    def h(argument: Any) -> None:
        for delivery in argument if isinstance(argument, list) else [argument]:
            if delivery.payload == "breaks" and delivery.attempt == 1:
                leave()
            write(delivery.id)

    culprit = add(handler="h", payload="breaks")
    messages = [culprit, *(add(handler="h") for _ in range(5))]
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    while QueuedMessage.objects.filter(dead_at=None).exists():  # the culprit, until it is due again
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert not QueuedMessage.objects.exists()
    written = sorted(map(int, Product.objects.values_list("name", flat=True)))
    if options.get("batch"):  # those before it in the list commit there by themselves
        assert set(written) == {message.pk for message in messages}
    else:
        assert written == [message.pk for message in messages]
    failed = FailedAttempt.objects.get()
    assert failed.message_id == culprit.pk
    assert failed.error_class == "django_mq.exceptions.HandlerBrokeTransaction"
    assert "left a transaction open on other" in failed.error_text


@pytest.mark.usefixtures("_other")
def test_the_handlers_own_error_is_kept() -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Any) -> None:
        raw_begin()
        raise ValueError("no such order")

    add(handler="h", max_attempts=1)
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert FailedAttempt.objects.get().error_class == "ValueError"


@pytest.mark.usefixtures("_other")
def test_commit_with_autocommit_off_is_no_failure() -> None:
    """The next handler has autocommit again."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Any) -> None:
        other = connections["other"]
        assert other.get_autocommit()
        other.set_autocommit(False)
        write(delivery.id)
        other.commit()

    messages = [add(handler="h") for _ in range(3)]
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    written = sorted(map(int, Product.objects.values_list("name", flat=True)))
    assert written == [message.pk for message in messages]
    assert not FailedAttempt.objects.exists()


@pytest.mark.usefixtures("_other")
@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "not atomic"])
def test_settings_do_not_reach_the_next_handler(options: dict[str, Any]) -> None:
    """The schema of one tenant is not that of the next, in one slice and in the next one."""
    paths: list[str] = []

    @handler("#", queue="mail", name="h", **options)
    def h(delivery: Delivery) -> None:
        with connections["other"].cursor() as cursor:
            cursor.execute("show search_path")
            paths.append(cursor.fetchone()[0])
            cursor.execute("set search_path to tenant_a, public")

    for count in (3, 1):
        for _ in range(count):
            add(handler="h")
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert not FailedAttempt.objects.exists()


def set_path(alias: str = "other") -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("set search_path to tenant_a, public")


def path(alias: str = "other") -> str:
    with connections[alias].cursor() as cursor:
        cursor.execute("show search_path")
        return str(cursor.fetchone()[0])


@pytest.mark.parametrize(
    ("leave", "by", "_other"),
    mostly_slow(
        [raw_begin, block_left_open, autocommit_off, set_path],
        ["hook", "receiver", "receiver, not atomic"],
        KEPT,
    ),
    indirect=["_other"],
)
def test_leftovers_of_hooks_and_receivers_do_not_reach_the_next_handler(
    leave: Callable[[], None], by: str, _other: None, settings: Any
) -> None:
    settings.DJANGO_MQ = {"BATCH_SIZE": 1}  # a slice for each message
    paths = set()

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never(), atomic="not" not in by)
    def h(delivery: Delivery) -> None:
        if by == "hook":
            transaction.on_commit(leave)
        paths.add(path())
        write(delivery.id)

    def receiver(**event: Any) -> None:
        leave()

    if "receiver" in by:
        message_acked.connect(receiver)
    try:
        messages = [add(handler="h").pk for _ in range(3)]
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    finally:
        message_acked.disconnect(receiver)
    assert sorted(map(int, Product.objects.values_list("name", flat=True))) == messages
    assert not FailedAttempt.objects.exists()
    assert len(paths) == 1


def test_a_session_that_a_handler_returns_to_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the connection hands the session, as it is, to whoever connects next."""
    other = connections.settings["other"]
    pool = {"min_size": 1, "max_size": 1}
    monkeypatch.setitem(other, "OPTIONS", {**other["OPTIONS"], "pool": pool})
    monkeypatch.setitem(other, "CONN_MAX_AGE", 0)
    paths = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        paths.append(path())
        set_path()
        connections["other"].close()

    try:
        for _ in range(3):
            add(handler="h")
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    finally:
        DatabaseWrapper._connection_pools.pop("other").close()
    assert len(paths) == 3
    assert len(set(paths)) == 1


def test_transaction_left_open_by_a_start_receiver(settings: Any) -> None:
    """Nothing is lost: the first message fails, since it may be the handler's doing."""
    policy = RetryPolicy(max_attempts=2, backoff=fixed(0.1))

    @handler("#", queue="mail", name="h", retry=policy)
    def h(delivery: Delivery) -> None:
        write(delivery.id)

    def receiver(**event: Any) -> None:
        message_started.disconnect(receiver)
        raw_begin()

    message_started.connect(receiver)
    try:
        messages = [add(handler="h").pk for _ in range(4)]
        while QueuedMessage.objects.filter(dead_at=None).exists():
            assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    finally:
        message_started.disconnect(receiver)
    assert sorted(map(int, Product.objects.values_list("name", flat=True))) == messages


def test_leftovers_of_a_hook_do_not_reach_other_hooks() -> None:
    """All in one slice."""
    paths = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        def hook() -> None:
            paths.append((path(), path("default")))
            write(delivery.id)
            set_path(), set_path("default"), raw_begin()

        transaction.on_commit(hook)

    messages = [add(handler="h").pk for _ in range(4)]
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert sorted(map(int, Product.objects.values_list("name", flat=True))) == messages


def test_a_closed_connection_is_not_left_to_the_next_handler() -> None:
    ran = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        ran.append(path())
        connections["other"].connection.close()

    for _ in range(3):
        add(handler="h")
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert len(ran) == 3
    assert not FailedAttempt.objects.exists()


def test_a_raw_begin_on_sqlite_is_noticed() -> None:
    wrapper = SQLite({**connections.settings["default"], "NAME": ":memory:"}, "lite")
    wrapper.connection = driver = sqlite3.connect(":memory:", isolation_level=None)
    wrapper.autocommit = True
    assert not thread_connections.is_open(wrapper)
    driver.execute("begin")
    assert thread_connections.is_open(wrapper)
    driver.close()


def test_a_receiver_does_not_end_the_thread() -> None:
    ran = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)

    def receiver(**event: Any) -> None:
        raise SystemExit(3)

    message_acked.connect(receiver)
    try:
        messages = [add(handler="h").pk for _ in range(3)]
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    finally:
        message_acked.disconnect(receiver)
    assert ran == messages


def test_an_alias_without_autocommit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncommitted writes of a handler are rolled back; the next handler does not commit them."""
    monkeypatch.setitem(connections.settings["other"], "AUTOCOMMIT", False)
    monkeypatch.setitem(connections.settings["other"], "CONN_MAX_AGE", 600)

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        write(delivery.id)
        if delivery.payload == "commits":
            connections["other"].commit()

    add(handler="h")
    committed = add(handler="h", payload="commits")
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert Product.objects.get().name == f"{committed.pk}"
    assert not FailedAttempt.objects.exists()


def test_a_handler_that_leaves_its_connection_alone_begins_no_transaction() -> None:
    statuses = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> None:
        driver = connections["default"].__dict__["connection"]  # a look that does not count
        statuses.append(driver.info.transaction_status)

    for _ in range(3):
        add(handler="h")
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    # On a connection that was silent for long, the first message is locked before it starts.
    assert statuses[1:] == [TransactionStatus.IDLE] * 2


@pytest.mark.parametrize("atomic", [True, False])
def test_search_path_set_by_a_receiver_is_reset(atomic: bool, settings: Any) -> None:
    settings.DJANGO_MQ = {"BATCH_SIZE": 1}
    paths = []

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never(), atomic=atomic)
    def h(delivery: Delivery) -> None:
        paths.append(path("default"))

    def receiver(**event: Any) -> None:
        set_path("default")

    message_acked.connect(receiver)
    try:
        for _ in range(3):
            add(handler="h")
        assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    finally:
        message_acked.disconnect(receiver)
    assert len(paths) == 3
    assert len(set(paths)) == 1


def test_only_a_session_that_was_used_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["other"], "CONN_MAX_AGE", 600)
    resets = []

    def noted(wrapper: BaseDatabaseWrapper) -> None:
        resets.append(wrapper.alias)
        reset_session(wrapper)

    monkeypatch.setattr(thread_connections, "reset_session", noted)

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        if delivery.payload:
            set_path()

    for payload in (True, False, False, True, False):
        add(handler="h", payload=payload)
    assert Worker(queues=["mail"], max_seconds=60).run(until_empty=True)
    assert resets.count("other") == 1 + 2, "the new session, and after each use"
