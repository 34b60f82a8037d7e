"""drain() in tests of every kind, where the project has several aliases."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import TestCase, TransactionTestCase
from django.test.utils import CaptureQueriesContext

from django_mq import broadcast, handler
from django_mq.handlers import isolated
from django_mq.testing import drain
from testproject.shop.models import Product
from tests.testing.drain.conftest import names, send, write


def backends(*aliases: str) -> list[int]:
    """The server's processes behind the connections."""
    found = []
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            found.append(cursor.fetchone()[0])
    return found


def run_both_kinds(*, atomic: bool = True) -> None:
    """Run a handler that writes and one that fails, on every alias they may use."""

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
        """They include the handlers' hooks, like those of all code under a TestCase."""

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
    """In a project with two aliases most tests use one."""

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
