"""drain() in every kind of test: connections of other aliases, handlers that fail."""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, connections, transaction
from django.test import TestCase, TransactionTestCase
from django.test.utils import CaptureQueriesContext

from django_mq import (
    HandlerBrokeTransaction,
    LeaseLost,
    Reject,
    RemoteError,
    ReplyTimeout,
    Retry,
    RetryPolicy,
    Snooze,
    ask,
    broadcast,
    fixed,
    handler,
    signals,
)
from django_mq.handlers import isolated
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import answering, drain, due
from testproject.shop.models import Product


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(scope="module", autouse=True)
def _two_aliases(django_db_setup: None) -> Iterator[None]:
    """The project has a second alias of the same database, and a read replica that mirrors it."""
    for alias in ("other", "replica"):
        connections.settings[alias] = copy.deepcopy(connections["default"].settings_dict)
    mirror = connections["replica"]
    mirror.settings_dict["TEST"]["MIRROR"] = "default"
    mirror.creation.set_as_test_mirror(connections["default"].settings_dict)
    yield
    for alias in ("other", "replica"):
        connections[alias].close()
        del connections.settings[alias]
        del connections[alias]


def send(type: str, payload: Any = None, **options: Any) -> Any:
    with transaction.atomic():
        return broadcast(type, payload, **options)


def write(name: str, *, using: str = "default") -> None:
    Product.objects.using(using).create(name=name, price=1)


def names(*, using: str = "default") -> set[str]:
    return set(Product.objects.using(using).values_list("name", flat=True))


def backends(*aliases: str) -> list[int]:
    """The server's processes behind the connections."""
    found = []
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            found.append(cursor.fetchone()[0])
    return found


def run_both_kinds(*, atomic: bool = True) -> None:
    """Run a handler that writes and one that fails, to every alias they may."""

    @handler("test.writes", name="writes", atomic=atomic)
    def writes(delivery: Any) -> None:
        for alias in delivery.payload:
            write(f"{alias} {delivery.id}", using=alias)

    @handler("test.fails", name="fails", atomic=atomic)
    def fails(delivery: Any) -> None:
        raise ValueError("no")

    aliases = ["default", "other"]
    send("test.writes", aliases)
    send("test.fails")
    assert [type(each) for each in drain(errors="keep")] == [ValueError]
    assert {"default", "other"} <= {each.split()[0] for each in names() | names(using="other")}


# ---- connections


class TwoAliasesTest(TestCase):
    databases = {"default", "other", "replica"}

    def test_no_connection_of_the_test_is_closed(self) -> None:
        for atomic in (True, False):
            with self.subTest(atomic=atomic), isolated():
                before = backends("default", "other", "replica")
                write(f"mine {atomic}")
                write(f"mine too {atomic}", using="other")
                run_both_kinds(atomic=atomic)
                assert backends("default", "other", "replica") == before
                assert f"mine {atomic}" in names()
                assert f"mine too {atomic}" in names(using="other")
                Product.objects.all().delete()
                Product.objects.using("other").all().delete()

    def test_the_queries_of_the_test_are_counted(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            Product.objects.count()

        send("test.one")
        with CaptureQueriesContext(connection) as queries:
            Product.objects.count()
            drain()
        asked = [each["sql"] for each in queries if "shop_product" in each["sql"]]
        assert len(asked) == 2, "the test's own, and the handler's"

    def test_the_hooks_of_the_test_are_kept(self) -> None:
        """And those of the handlers are with them, as of all code under a TestCase."""

        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            transaction.on_commit(lambda: called.append("handler"))

        called: list[str] = []
        with self.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(lambda: called.append("test"))
            send("test.one")
            drain()
        assert called == ["test", "handler"]

    def test_a_queue_on_the_second_alias(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            write("there", using="other")

        with transaction.atomic(using="other"):
            broadcast("test.one", using="other")
        assert drain() == 0
        assert drain(using="other") == 1
        assert names(using="other") == {"there"}


class OneOfTwoAliasesTest(TestCase):
    """A project with two aliases has mostly tests of one."""

    def test_the_connection_of_the_test_is_not_closed(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            write("by the handler")

        write("by the test")
        send("test.one")
        assert drain() == 1
        assert names() == {"by the test", "by the handler"}


class TwoAliasesCommittedTest(TransactionTestCase):
    databases = {"default", "other"}
    available_apps = ["django_mq", "testproject.shop"]

    def test_no_connection_of_the_test_is_closed(self) -> None:
        before = backends("default", "other")
        with connection.cursor() as cursor:
            cursor.execute("set search_path to public, pg_temp")
        run_both_kinds()
        with connection.cursor() as cursor:
            cursor.execute("show search_path")
            assert cursor.fetchone() == ("public, pg_temp",)
        assert backends("default", "other") == before

    def test_a_block_of_the_test_on_the_other_alias_stays_open(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            write("by the handler")

        send("test.one")
        with transaction.atomic(using="other"):
            write("by the test", using="other")
            assert drain() == 1
        assert names() == {"by the test", "by the handler"}

    def test_hooks_run_after_the_commit(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            transaction.on_commit(lambda: called.append(connection.in_atomic_block))

        called: list[bool] = []
        send("test.one")
        drain()
        assert called == [False]


@pytest.mark.django_db(databases=["default", "other"])
def test_the_mark_of_pytest_django() -> None:
    before = backends("default", "other")
    run_both_kinds()
    assert backends("default", "other") == before


# ---- handlers that fail


def _fails(error: BaseException, **options: Any) -> None:
    @handler("test.fails", name="fails", **options)
    def fails(delivery: Any) -> None:
        raise error


@pytest.mark.django_db
@pytest.mark.parametrize("kind", ["atomic", "not atomic", "async", "batch"])
def test_the_first_error_is_raised_as_it_was(kind: str) -> None:
    """With the handler in its traceback, and a note of whose it is; all others have run."""

    def culprit() -> None:
        raise ValueError("no such customer")

    ran: list[int] = []
    if kind == "async":

        @handler("test.fails", name="fails")
        async def fails(delivery: Any) -> None:
            culprit()
    else:

        @handler("test.fails", name="fails", atomic=kind != "not atomic", batch=kind == "batch")
        def also_fails(delivery: Any) -> None:
            culprit()

    @handler("test.ok", name="ok")
    def ok(delivery: Any) -> None:
        ran.append(delivery.id)

    (first,) = send("test.fails").ids
    (second,) = send("test.fails").ids
    (fine,) = send("test.ok").ids
    with pytest.raises(ValueError, match="no such customer") as caught:
        drain()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "culprit"
    (note, more) = caught.value.__notes__
    assert note == (
        f"raised by handler fails: message {first} (test.fails), queue default, attempt 1 of 20"
    )
    assert more == '1 more attempt failed meanwhile; drain(errors="keep") returns all errors'
    assert ran == [fine]
    assert [row.pk for row in QueuedMessage.objects.order_by("pk")] == [first, second]
    assert {row.state for row in QueuedMessage.objects.all()} == {"retrying"}
    assert FailedAttempt.objects.count() == 2
    assert drain() == 0, "it is told once"


@pytest.mark.django_db
def test_errors_may_be_kept() -> None:
    _fails(KeyError("x"))

    @handler("test.ok", name="ok")
    def ok(delivery: Any) -> None: ...

    assert drain(errors="keep") == []
    send("test.ok")
    send("test.fails")
    errors = drain(errors="keep")
    assert [type(each) for each in errors] == [KeyError]
    assert errors.deliveries == 2
    assert "message" in errors[0].__notes__[0]
    with pytest.raises(ValueError, match='errors must be "raise" or "keep"'):
        drain(errors="ignore")  # type: ignore[call-overload]


@pytest.mark.django_db
def test_what_a_handler_asks_for_is_no_failure() -> None:
    """Retry and Snooze ask for another time, Reject says that there shall be none."""
    for number, error in enumerate((Retry(after=60), Snooze(60), Reject("not for us"))):
        with isolated():
            _fails(error)
            send("test.fails")
            assert drain() == 1, number
    assert [row.state for row in QueuedMessage.objects.order_by("pk")] == [
        "retrying",
        "delayed",
        "dead",
    ]


@pytest.mark.django_db
def test_a_retry_that_cannot_be_had_is_a_failure() -> None:
    """The handler counts on another attempt, and there is none left."""
    _fails(Retry(after=60), retry=RetryPolicy.never())
    send("test.fails")
    with pytest.raises(Retry) as caught:
        drain()
    assert caught.value.__notes__[0].endswith("attempt 1 of 1")


@pytest.mark.django_db
def test_each_attempt_that_fails_is_told() -> None:
    """A policy without a wait has them all in one drain."""

    @handler("test.fails", name="fails", retry=RetryPolicy(max_attempts=3, backoff=fixed(0)))
    def fails(delivery: Any) -> None:
        raise ValueError(f"attempt {delivery.attempt}")

    send("test.fails")
    errors = list(drain(errors="keep"))
    for _ in range(3):
        due()
        errors += drain(errors="keep")
    assert [str(each) for each in errors] == ["attempt 1", "attempt 2", "attempt 3"]
    assert QueuedMessage.objects.get().state == "dead"


@pytest.mark.django_db
def test_an_assertion_in_a_handler_reaches_the_test() -> None:
    @handler("test.fails", name="fails", retry=RetryPolicy.never())
    def fails(delivery: Any) -> None:
        pytest.fail("this handler must not run")

    send("test.fails")
    with pytest.raises(pytest.fail.Exception, match="must not run"):
        drain()


@pytest.mark.django_db
@pytest.mark.parametrize("errors", ["raise", "keep"])
def test_ctrl_c_is_not_kept(errors: Any) -> None:
    _fails(KeyboardInterrupt())
    ran: list[int] = []

    @handler("test.ok", name="ok")
    def ok(delivery: Any) -> None:
        ran.append(delivery.id)

    send("test.fails")
    send("test.ok")
    with pytest.raises(KeyboardInterrupt):
        drain(errors=errors)
    assert not ran
    assert drain() == 1


@pytest.mark.django_db
def test_an_error_that_takes_no_note_is_raised_without_one() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError("frozen")

    _fails(Frozen("no"))
    send("test.fails")
    with pytest.raises(Frozen):
        drain()


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_a_database_error_of_a_handler_leaves_the_test_its_transaction(atomic: bool) -> None:
    @handler("test.fails", name="fails", atomic=atomic)
    def fails(delivery: Any) -> None:
        write("undone")
        Product.objects.create(pk=taken.pk, name="again", price=1)

    taken = Product.objects.create(name="first", price=1)
    send("test.fails")
    with pytest.raises(IntegrityError):
        drain()
    assert names() == {"first"}
    assert QueuedMessage.objects.get().state == "retrying"


@pytest.mark.django_db
def test_what_a_handler_that_is_not_atomic_wrote_stays() -> None:
    """As outside a test, where each of its statements is committed by itself."""

    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        write("stays")
        raise ValueError

    send("test.fails")
    with pytest.raises(ValueError):  # noqa: PT011
        drain()
    assert names() == {"stays"}


@pytest.mark.django_db
def test_a_swallowed_database_error_is_told_where_it_spoils_the_transaction_of_the_test() -> None:
    """A worker's handler that is not atomic may do that; in a TestCase all is one transaction."""

    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("select 1/0")
        except Exception:  # noqa: S110
            pass

    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="TransactionTestCase"):
        drain()
    assert QueuedMessage.objects.get().state == "retrying"


@pytest.mark.django_db(transaction=True, available_apps=["django_mq", "testproject.shop"])
def test_without_a_transaction_of_the_test_it_may_be_swallowed() -> None:
    test = test_a_swallowed_database_error_is_told_where_it_spoils_the_transaction_of_the_test
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test()
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db
def test_a_block_that_was_left_open_is_told() -> None:
    @handler("test.fails", name="fails", atomic=False)
    def fails(delivery: Any) -> None:
        transaction.atomic().__enter__()
        write("undone")

    depth = len(connection.atomic_blocks)
    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="left an atomic"):
        drain()
    assert len(connection.atomic_blocks) == depth
    assert not names()


@pytest.mark.django_db
def test_who_ends_the_transaction_of_the_test_is_named() -> None:
    """Nothing can be mended then; the text says whose doing it was."""

    @handler("test.fails", name="fails")
    def fails(delivery: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("rollback")

    send("test.fails")
    with pytest.raises(HandlerBrokeTransaction, match="ended its transaction") as caught:
        drain()
    assert "handler fails" in caught.value.__notes__[0]
    connection.set_rollback(True)


@pytest.mark.django_db
def test_who_removes_its_own_message_is_told() -> None:
    @handler("test.fails", name="fails")
    def fails(delivery: Any) -> None:
        write("undone")
        QueuedMessage.objects.filter(pk=delivery.id).delete()

    send("test.fails")
    with pytest.raises(LeaseLost) as caught:
        drain()
    assert "handler fails" in caught.value.__notes__[0]
    assert not names()
    assert QueuedMessage.objects.count() == 1, "what the handler did is undone"


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_signals_are_sent(atomic: bool) -> None:
    heard: list[str] = []
    receivers = {}
    for name in ("message_acked", "message_retried", "message_started"):

        def receiver(sender: str, name: str = name, **data: Any) -> None:
            heard.append(f"{sender} {name}")

        receivers[name] = receiver
        getattr(signals, name).connect(receiver)

    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None:
        if delivery.payload:
            raise ValueError

    try:
        send("test.any", 0)
        send("test.any", 1)
        drain(errors="keep")
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    assert heard == [
        "any message_started",
        "any message_acked",
        "any message_started",
        "any message_retried",
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_what_has_expired_does_not_run(atomic: bool) -> None:
    ran: list[int] = []

    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None:
        ran.append(delivery.id)

    send("test.any", expires=3600)
    QueuedMessage.objects.update(expires_at="2000-01-01T00:00Z")
    drain()
    assert not ran
    assert QueuedMessage.objects.get().dead_reason == "expired"


@pytest.mark.django_db(transaction=True, available_apps=["django_mq", "testproject.shop"])
def test_in_an_async_test() -> None:
    """By sync_to_async(), with handlers that use the ORM from their coroutine."""

    @handler("test.async", name="async")
    async def coroutine(delivery: Any) -> None:
        await Product.objects.acreate(name=f"coroutine {delivery.payload}", price=1)
        if delivery.payload:
            raise ValueError("no")

    async def test() -> None:
        try:
            await sync_to_async(send)("test.async", 0)
            assert await sync_to_async(drain)() == 1
            await sync_to_async(send)("test.async", 1)
            with pytest.raises(ValueError, match="no"):
                await sync_to_async(drain)()
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(asyncio.wait_for(test(), 60))
    assert names() == {"coroutine 0", "coroutine 1"}


@pytest.mark.django_db(transaction=True, available_apps=["django_mq", "testproject.shop"])
@pytest.mark.parametrize("atomic", [True, False])
def test_who_commits_by_hand_keeps_that(atomic: bool, settings: Any) -> None:
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}

    @handler("test.any", name="any", atomic=atomic)
    def any_(delivery: Any) -> None:
        write("by the handler")
        if delivery.payload:
            raise ValueError

    connection.set_autocommit(False)
    try:
        write("by the test")
        broadcast("test.any", 0)
        assert drain() == 1
        assert names() == {"by the test", "by the handler"}
        connection.rollback()
        assert not names()
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    assert not QueuedMessage.objects.exists()


@pytest.mark.django_db
def test_an_error_after_the_end_is_told_and_the_end_holds() -> None:
    @handler("test.any", name="any", atomic=False)
    def any_(delivery: Any) -> None:
        with delivery.finish():
            write("finished")
        raise ValueError("too late")

    send("test.any")
    with pytest.raises(ValueError, match="too late"):
        drain()
    assert names() == {"finished"}
    assert not QueuedMessage.objects.exists()


# ---- answering()


@pytest.mark.django_db
def test_an_error_while_answering_reaches_the_test() -> None:
    """Whoever asks cannot know of it: for them the reply is only late."""
    _fails(ZeroDivisionError("no"), queue="answers")
    with pytest.raises(ReplyTimeout) as caught, answering():
        ask("test.fails")
    assert "ZeroDivisionError: no" in "\n".join(caught.value.__notes__)
    due()
    with pytest.raises(ZeroDivisionError), answering(), pytest.raises(ReplyTimeout):
        ask("test.fails")


@pytest.mark.django_db
def test_an_error_that_the_asker_gets_is_not_told_twice() -> None:
    _fails(ZeroDivisionError("no"), queue="answers", retry=RetryPolicy.never())
    with answering(), pytest.raises(RemoteError, match="ZeroDivisionError"):
        ask("test.fails")
