"""django_mq.testing: all of it in a plain TestCase (PMQ-13, PMQ-14, PMQ-15, PMQ-16, PMQ-19)."""

from __future__ import annotations

from typing import Any

import pytest
from django.core import mail
from django.db import connection, transaction
from django.test import TestCase, override_settings

from django_mq import (
    InvalidName,
    InvalidOption,
    InvalidPayload,
    Message,
    PayloadTooLarge,
    Reject,
    Retry,
    broadcast,
    broadcast_many,
    cancel,
    handler,
)
from django_mq.handlers import isolated
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import (
    answering,
    assert_broadcast,
    capture_broadcasts,
    deliver,
    drain,
    due,
)
from testproject.shop.models import Product
from tests.rows import add, stored


def send(type: str, payload: Any = None, **options: Any) -> Any:
    with transaction.atomic():
        return broadcast(type, payload, **options)


def _broadcast_and_fail() -> None:
    with transaction.atomic():
        broadcast("test.lost")
        raise ZeroDivisionError


class DrainTest(TestCase):
    def test_a_held_message_ages_by_the_time_that_due_skips(self) -> None:
        message = add(handler="shop.renamed")
        with override_settings(DJANGO_MQ={"HOLD_FOR": 60}):
            for _ in range(7):  # waits of 1, 2, 4, 8, 16 and 32 seconds, then it is dead
                assert drain() == 0
                due()
        assert stored(message).state == "dead"

    def test_drain_runs_due_messages_and_their_broadcasts(self) -> None:
        """PMQ-19: it returns the number of processed messages, 0 for none."""
        seen = []

        @handler("test.first", name="first")
        def first(delivery: Any) -> None:
            seen.append(delivery.payload)
            broadcast("test.second", {"after": delivery.payload["n"]})

        @handler("test.second", name="second", atomic=False)
        def second(delivery: Any) -> None:
            seen.append(delivery.payload)

        assert drain() == 0
        send("test.first", {"n": 1})
        assert drain() == 2
        assert seen == [{"n": 1}, {"after": 1}]
        assert not QueuedMessage.objects.exists()

    def test_one_queue_alone(self) -> None:
        @handler("test.a", queue="a", name="a")
        def a(delivery: Any) -> None: ...

        @handler("test.b", queue="b", name="b")
        def b(delivery: Any) -> None: ...

        send("test.a")
        send("test.b")
        assert drain("a") == 1
        assert [row.queue for row in QueuedMessage.objects.all()] == ["b"]

    def test_a_failure_is_undone_written_down_and_due_later(self) -> None:
        @handler("test.fails", name="fails")
        def fails(delivery: Any) -> None:
            Product.objects.create(name="undone", price=1, stock=1)
            if delivery.attempt < 3:
                raise ValueError(f"attempt {delivery.attempt}")

        send("test.fails")
        with self.assertRaisesMessage(ValueError, "attempt 1"):
            drain()
        assert not Product.objects.filter(name="undone").exists()
        assert QueuedMessage.objects.get().state == "retrying"
        assert due() == 1
        assert [str(each) for each in drain(errors="keep")] == ["attempt 2"]
        assert due() == 1
        assert drain() == 1
        assert Product.objects.filter(name="undone").count() == 1
        assert [each.error_text for each in FailedAttempt.objects.order_by("attempt")] == [
            "attempt 1",
            "attempt 2",
        ]

    def test_retry_and_reject(self) -> None:
        @handler("test.retry", name="retry")
        def retry(delivery: Any) -> None:
            if delivery.attempt == 1:
                raise Retry(after=0)
            raise Reject("no such customer")

        send("test.retry")
        assert drain() == 2
        dead = QueuedMessage.objects.get()
        assert (dead.state, dead.dead_reason) == ("dead", "no such customer")

    def test_async_and_batch_handlers(self) -> None:
        seen = []

        @handler("test.async", name="async")
        async def coroutine(delivery: Any) -> None:
            seen.append(delivery.payload)

        @handler("test.batch", name="batch", batch=True)
        def batch(deliveries: Any) -> None:
            seen.extend(each.payload for each in deliveries)

        send("test.async", {"n": 1})
        send("test.batch", {"n": 2})
        assert drain() == 2
        assert seen == [{"n": 1}, {"n": 2}]

    def test_delayed_messages_run_in_due_order_after_due(self) -> None:
        seen = []

        @handler("test.later", name="later")
        def later(delivery: Any) -> None:
            seen.append(delivery.payload["n"])

        send("test.later", {"n": 2}, after=7200)
        send("test.later", {"n": 1}, after=60)
        assert drain() == 0
        with pytest.raises(InvalidName):
            due("a b")
        assert due() == 2
        assert drain() == 2
        assert seen == [1, 2]

    def test_drain_restores_the_connection(self) -> None:
        before = type(connection._connections[connection._alias])  # type: ignore[attr-defined]

        @handler("test.any", name="any")
        def any_(delivery: Any) -> None: ...

        send("test.any")
        drain()
        after = type(connection._connections[connection._alias])  # type: ignore[attr-defined]
        assert after is before


class DeliverTest(TestCase):
    def test_the_payload_goes_through_json(self) -> None:
        """PMQ-13, PMQ-15: no row is written, and keys arrive in the same form as from the queue."""

        @handler("test.one", name="one")
        def one(delivery: Any) -> Any:
            return delivery.payload, delivery.attempt, delivery.metadata, delivery.handler

        answer = deliver(one, {1: "x"}, attempt=3, metadata={"tier": "gold"})
        assert answer == ({"1": "x"}, 3, {"tier": "gold"}, "one")
        assert deliver("one", {"n": 1})[0] == {"n": 1}
        assert not QueuedMessage.objects.exists()

    def test_the_type_is_the_only_plain_one_of_the_handler(self) -> None:
        """Otherwise it is test.message, because the handler does not name a single type."""
        for patterns, type in (
            (("shop.orders.placed",), "shop.orders.placed"),
            (("shop.orders.placed", "shop.*.moved"), "shop.orders.placed"),
            (("shop.orders.placed", "shop.orders.moved"), "test.message"),
            (("shop.#",), "test.message"),
        ):
            with isolated():
                handler(*patterns, name="one")(lambda delivery: delivery.type)
                assert deliver("one") == type
                assert deliver("one", type="test.one") == "test.one"

    def test_a_function_that_is_two_handlers_is_called_by_name(self) -> None:
        @handler("test.one", name="one")
        @handler("test.two", name="two")
        def both(delivery: Any) -> Any:
            return delivery.handler, delivery.type

        assert deliver("one") == ("one", "test.one")
        assert deliver("two") == ("two", "test.two")
        with pytest.raises(LookupError, match="several handlers: give one of the names two, one"):
            deliver(both)

    def test_a_method_is_found(self) -> None:
        class Mailer:
            def send(self, delivery: Any) -> Any:
                return delivery.payload["id"]

        mailer = Mailer()
        handler("test.one", name="method")(mailer.send)
        assert deliver(mailer.send, {"id": 7}) == 7
        with pytest.raises(LookupError, match="is not a handler"):
            deliver(Mailer().send, {"id": 7})

    def test_errors_reach_the_caller_and_writes_are_undone(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            Product.objects.create(name="undone", price=1, stock=1)
            raise KeyError("no")

        with pytest.raises(KeyError):
            deliver(one)
        assert not Product.objects.filter(name="undone").exists()

    def test_refused_broadcast_undoes_the_handlers_writes(self) -> None:
        """PMQ-16: those and the messages before it, in the same call."""

        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            Product.objects.create(name="kept?", price=1, stock=1)
            broadcast("test.two", {"n": 1})
            broadcast("test.two", {"n": object()})

        with pytest.raises(InvalidPayload):
            deliver(one)
        assert not Product.objects.exists()
        assert not QueuedMessage.objects.exists()

    def test_deliver_refuses_invalid_arguments(self) -> None:
        """PMQ-16: a serialization error is the caller's."""

        @handler("test.one", name="one")
        def one(delivery: Any) -> None: ...

        with pytest.raises(InvalidPayload):
            deliver(one, {"x": object()})
        for name in ("queue", "type", "key"):
            with pytest.raises(InvalidName):
                deliver(one, **{name: "a\nb"})  # type: ignore[arg-type]
        with pytest.raises(LookupError, match="is not a handler"):
            deliver(print)

    def test_a_handler_that_would_not_run_in_a_worker_does_not_run_here(self) -> None:
        async def ask_elsewhere() -> None:
            raise AssertionError("nobody awaits it")

        for atomic in (True, False):
            with isolated():
                handler("test.one", name="one", atomic=atomic)(lambda delivery: ask_elsewhere())
                with pytest.raises(TypeError, match="returned a coroutine"):
                    deliver("one")

    def test_attempts_count_from_one(self) -> None:
        handler("test.one", name="one")(lambda delivery: delivery.attempt)
        assert deliver("one", attempt=20) == 20
        for wrong in ({"attempt": 0}, {"attempt": True}, {"max_attempts": 0}):
            with pytest.raises(InvalidOption, match="whole number from 1"):
                deliver("one", **wrong)
        with pytest.raises(InvalidOption, match="attempt is 21, above max_attempts, which is 20"):
            deliver("one", attempt=21)
        assert deliver("one", attempt=21, max_attempts=21) == 21

    def test_options_that_no_stored_message_has_are_refused(self) -> None:
        """As broadcast() refuses them, but for the entries that django_mq adds itself."""
        handler("test.one", name="one")(lambda delivery: delivery.metadata)
        for version in (0, -1, True, "1", 2**31):
            with pytest.raises(InvalidOption, match=r"schema_version .* whole number from 1"):
                deliver("one", schema_version=version)  # type: ignore[arg-type]
        for metadata in (5, [("a", 1)], "text"):
            with pytest.raises(InvalidOption, match="metadata must be a dict"):
                deliver("one", metadata=metadata)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="the key 1: use only str keys"):
            deliver("one", metadata={1: 2})  # type: ignore[dict-item]
        with pytest.raises(PayloadTooLarge, match="metadata"):
            deliver("one", metadata={"a": "x" * 20_000})
        assert deliver("one", metadata={"mq.replay_of": "7"}) == {"mq.replay_of": "7"}

    def test_a_version_that_a_worker_would_hold_is_refused(self) -> None:
        handler("test.one", name="one", schema_version=2)(lambda delivery: delivery.schema_version)
        assert deliver("one", schema_version=2) == 2
        with pytest.raises(InvalidOption, match="schema version 3 is newer than version 2"):
            deliver("one", schema_version=3)

    def test_a_wrong_argument_of_extend_is_refused_as_by_a_worker(self) -> None:
        @handler("test.one", name="one", atomic=False)
        def one(delivery: Any) -> None:
            delivery.extend("1h")

        @handler("test.list", name="list", atomic=False, batch=True)
        def many(deliveries: list[Any]) -> None:
            deliveries[0].extend("1h")

        for name in "one", "list":
            with pytest.raises(ValueError, match=r"extend\('1h'\): give seconds or a timedelta"):
                deliver(name)

    def test_a_handler_that_is_not_atomic_may_finish(self) -> None:
        @handler("test.one", name="one", atomic=False)
        def one(delivery: Any) -> None:
            delivery.extend(60)
            with delivery.finish():
                Product.objects.create(name="finished", price=1, stock=1)

        @handler("test.two", name="two")
        async def two(delivery: Any) -> Any:
            return await delivery.afinish(Product.objects.count)

        deliver(one)
        assert deliver(two) == 1

    def test_an_atomic_handler_is_finished_by_returning(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None:
            delivery.finish()

        with pytest.raises(TypeError, match="atomic=False"):
            deliver(one)


class CaptureTest(TestCase):
    def test_rolled_back_broadcasts_are_not_captured(self) -> None:
        with capture_broadcasts() as broadcasts:
            send("test.kept", {"n": 1})
            with pytest.raises(ZeroDivisionError):
                _broadcast_and_fail()
            with transaction.atomic():
                broadcast_many(Message("test.many", {"n": n}) for n in range(2))
        assert [each.type for each in broadcasts] == ["test.kept", "test.many", "test.many"]
        assert broadcasts[0].payload == {"n": 1}
        assert len(broadcasts) == 3

    def test_a_stream_is_captured_as_a_list_is(self) -> None:
        """In order, each message once, with and without unique ids."""
        for name in ("one", "two"):
            handler("test.*", name=name)(lambda delivery: None)
        messages = [Message("test.x", n, unique_id="u" if n % 2 else None) for n in range(4)]
        for made in (messages, iter(messages)):
            with capture_broadcasts() as broadcasts, transaction.atomic():
                broadcast_many(made)
                if made is messages:
                    cancel(type="test.x")
            assert [(each.payload, each.handlers) for each in broadcasts] == [
                (n, ("one", "two")) for n in (0, 1, 2)
            ]

    def test_many_messages_are_looked_up_together(self) -> None:
        """Each one read all hooks of the transaction: 4,000 messages took 2.5 s."""

        class Hooks(list[Any]):
            reads = 0

            def __iter__(self) -> Any:
                self.reads += 1
                return super().__iter__()

        with capture_broadcasts() as broadcasts, transaction.atomic():
            broadcast_many([Message("test.x", n) for n in range(20)])
            connection.run_on_commit = hooks = Hooks(connection.run_on_commit)
            assert len(broadcasts) == 20
        assert hooks.reads == 1

    def test_it_ends_with_its_block(self) -> None:
        with capture_broadcasts() as broadcasts:
            pass
        send("test.later")
        assert not broadcasts

    def test_capture_keeps_drained_messages(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None: ...

        with capture_broadcasts():
            send("test.one")
            drain()
            assert_broadcast("test.one", times=1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("count", [10, 60])
def test_capture_is_immediate_with_autocommit_off(settings: Any, count: int) -> None:
    """Django has no hooks then."""
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}
    connection.set_autocommit(False)
    try:
        with capture_broadcasts() as broadcasts:
            broadcast_many([Message("test.x", n) for n in range(count)])
        assert len(broadcasts) == count
        connection.commit()
    finally:
        connection.set_autocommit(True)
    assert QueuedMessage.objects.count() == count


class AssertBroadcastTest(TestCase):
    def test_a_message_with_several_handlers_counts_once(self) -> None:
        @handler("test.*", name="one")
        def one(delivery: Any) -> None: ...

        @handler("test.#", name="two")
        def two(delivery: Any) -> None: ...

        send("test.two", {"n": 1})
        assert_broadcast("test.two", payload={"n": 1}, times=1)
        send("test.two", {"n": 1})
        assert_broadcast("test.two", payload={"n": 1}, times=2)
        assert_broadcast("test.other", times=0)

    def test_failure_lists_the_broadcasts(self) -> None:
        send("test.there", {"n": 1})
        with pytest.raises(AssertionError, match=r'test\.there \{"n": 1\} \(1\)'):
            assert_broadcast("test.there", payload={"n": 2})
        with pytest.raises(AssertionError, match="was broadcast 1 time"):
            assert_broadcast("test.there", times=2)

    def test_failure_mentions_drained_messages(self) -> None:
        @handler("test.one", name="one")
        def one(delivery: Any) -> None: ...

        send("test.one")
        drain()
        hint = r"drain\(\) has run do not count: assert before it, or use capture_broadcasts"
        for times in (None, 1):
            with pytest.raises(AssertionError, match=hint):
                assert_broadcast("test.one", times=times)
        send("test.one")
        with pytest.raises(AssertionError) as too_many:
            assert_broadcast("test.one", times=0)
        with capture_broadcasts(), pytest.raises(AssertionError) as captured:
            assert_broadcast("test.one")
        assert "drain" not in f"{too_many.value}{captured.value}"


@pytest.mark.django_db
def test_a_drain_does_not_begin_within_another() -> None:
    """On the same connection each would release the other's savepoints."""
    refused: list[str] = []

    @handler("inner", queue="mail", name="inner")
    def inner(delivery: Any) -> None: ...

    @handler("outer", queue="other", name="outer")
    def outer(delivery: Any) -> None:
        Product.objects.create(name="undone", price=1)
        try:
            drain("mail")
        except RuntimeError as error:
            refused.append(str(error))
        raise Reject("no")

    with transaction.atomic():
        broadcast("outer", queue="other")
        broadcast("inner", queue="mail")
    drain("other")
    assert refused == ["drain() cannot be called by a handler or hook that drain() runs"]
    assert not Product.objects.exists()


@pytest.mark.django_db
def test_real_messages_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """S24: in a shell of production, due() would make every delayed message run now."""
    monkeypatch.delattr(mail, "outbox")
    assert drain() == 0, "pytest without pytest-django"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for helper in (drain, due, answering().__enter__):
        with pytest.raises(RuntimeError, match="is for tests, and DEBUG is off"):
            helper()
