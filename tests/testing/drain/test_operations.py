"""drain() carries out the operations that operators asked for, as workers do."""

from __future__ import annotations

from typing import Any

from django.db import connection
from django.test import TestCase, TransactionTestCase

from django_mq import RetryPolicy, handler, queues
from django_mq.handlers import isolated
from django_mq.models import Operation, QueuedMessage
from django_mq.testing import drain
from tests.testing.drain.conftest import send

#: A trigger that lets nobody cancel.
REFUSE = """
create function refuse() returns trigger language plpgsql as $$
begin
    if old.leased_until is null then raise exception 'not today'; end if;
    return old;
end $$;
create trigger refuse before delete on django_mq_queuedmessage
   for each row execute function refuse()
"""


class Promises:
    """The same in a TestCase, where all is one transaction, and without."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        registry = isolated()
        registry.__enter__()
        self.addCleanup(registry.__exit__, None, None, None)  # type: ignore[attr-defined]

    def test_dead_letters_that_are_requeued_run(self) -> None:
        ran: list[int] = []

        @handler("test.once", name="once", retry=RetryPolicy.never())
        def once(delivery: Any) -> None:
            ran.append(delivery.attempt)
            if delivery.attempt == 1:
                raise ValueError("no")

        send("test.once")
        send("test.once")
        assert drain(errors="keep").deliveries == 2
        operation = queues.operate("requeue", handler="once", state="dead")
        assert drain() == 2
        assert ran == [1, 1, 2, 2]
        operation.refresh_from_db()
        assert (operation.state, operation.done) == ("done", 2)

    def test_cancelled_message_does_not_run(self) -> None:
        @handler("test.noted", name="noted")
        def noted(delivery: Any) -> None:
            raise AssertionError

        send("test.noted")
        queues.operate("cancel", queue="default")
        assert drain() == 0
        assert not QueuedMessage.objects.exists()

    def test_one_that_the_database_refuses_has_failed(self) -> None:
        @handler("test.noted", name="noted")
        def noted(delivery: Any) -> None: ...

        send("test.noted")
        operation = queues.operate("cancel", queue="default")
        with connection.cursor() as cursor:
            cursor.execute(REFUSE)
            self.addCleanup(self.allow)  # type: ignore[attr-defined]
            assert drain() == 1
        operation.refresh_from_db()
        assert operation.state == "failed"
        assert "not today" in operation.error

    @staticmethod
    def allow() -> None:
        with connection.cursor() as cursor:
            cursor.execute("drop function if exists refuse cascade")

    def test_a_handler_may_ask_for_one(self) -> None:
        @handler("test.asks", name="asks")
        def asks(delivery: Any) -> None:
            queues.operate("run_now", type="test.later")

        @handler("test.later", name="later")
        def later(delivery: Any) -> None: ...

        send("test.later", after=1000)
        send("test.asks")
        assert drain() == 2
        assert Operation.objects.get().state == "done"


class InOneTransaction(Promises, TestCase):
    pass


class InTransactionsOfTheirOwn(Promises, TransactionTestCase):
    pass
