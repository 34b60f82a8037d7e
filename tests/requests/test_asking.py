"""Requests in a TestCase's transaction: storage, refusals, and places to wait."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.test import TestCase

from django_mq import (
    CannotWait,
    NotInTransaction,
    PendingReply,
    ReplyTimeout,
    RoutingError,
    aask,
    agather,
    arequest,
    ask,
    broadcast,
    gather,
    handler,
    request,
)
from django_mq.messages import set_current
from django_mq.models import FailedAttempt, QueuedMessage, Result
from django_mq.requests.collecting import _aresult
from django_mq.store.results import ReplyState
from django_mq.testing import answering, capture_broadcasts, drain
from testproject.shop.models import Product
from tests.database import second_connection
from tests.requests.questions import NEVER, echo
from tests.rows import delivery

pytestmark = pytest.mark.django_db


def request_within(payload: Any, *, then: type[Exception] | None = None) -> PendingReply:
    """Send a request in a separate block, which ends with an exception if `then` is given."""
    pending = None
    try:
        with transaction.atomic():
            pending = request("test.echo", payload)
            if then is not None:
                raise then
    except ZeroDivisionError:
        pass
    assert pending is not None
    return pending


def test_it_is_a_message_that_wants_a_result() -> None:
    """RMQ-22: a broadcast beside it is not a request, and keeps no result."""
    echo(queue="answers", queues=("others",))
    pending = request(
        "test.echo",
        {"n": 1},
        queue="others",
        metadata={"tier": "gold"},
        after=5,
        expires=timedelta(seconds=60),
        priority=7,
        retry=NEVER,
    )
    with transaction.atomic():
        [plain] = broadcast("test.echo", {"n": 2}).ids
    row = QueuedMessage.objects.get(pk=pending.id)
    assert (row.wants_result, row.queue, row.priority) == (True, "others", 7)
    assert (row.max_attempts, row.metadata) == (1, {"tier": "gold"})
    assert row.expires_at is not None
    assert row.expires_at - row.processable_after == timedelta(seconds=55)
    assert not QueuedMessage.objects.get(pk=plain).wants_result
    assert drain() == 1
    assert not Result.objects.exists()


OPTIONS: dict[str, Any] = {
    "queue": "others",
    "metadata": {"tier": "gold"},
    "schema_version": 2,
    "expires": 60,
    "priority": 7,
    "key": "k",
    "retry": NEVER,
}


def late(*args: Any, **options: Any) -> None:
    with pytest.raises(ReplyTimeout):
        ask(*args, timeout=0, **options)


def late_async(*args: Any, **options: Any) -> None:
    with pytest.raises(ReplyTimeout):
        async_to_sync(aask)(*args, timeout=0, **options)


def test_reply_timeout_names_the_command_for_its_message(
    transactional_db: None, settings: Any
) -> None:
    for database, option in ((None, ""), ("elsewhere", " --database default")):
        settings.DJANGO_MQ = {"DATABASE": database}
        with pytest.raises(ReplyTimeout) as caught:
            ask("test.echo", timeout=0, using="default")
        assert f"`manage.py mq_why {caught.value.id}{option}` says" in str(caught.value)


@pytest.mark.parametrize("send", [request, late, async_to_sync(arequest), late_async])
def test_each_option_reaches_the_message(send: Any) -> None:
    send("test.echo", 1, **OPTIONS)
    row = QueuedMessage.objects.get()
    assert (row.queue, row.metadata, row.schema_version) == ("others", {"tier": "gold"}, 2)
    assert (row.priority, row.key, row.max_attempts) == (7, "k", 1)
    assert row.expires_at is not None


@pytest.fixture
def no_autocommit(transactional_db: None) -> Iterator[None]:
    transaction.set_autocommit(False)
    yield
    transaction.rollback()
    transaction.set_autocommit(True)


def test_while_autocommit_is_off_a_request_needs_a_block(no_autocommit: None) -> None:
    """Like a broadcast: no commit of its own could keep the promise."""
    echo()
    for refused in (NotInTransaction, CannotWait):
        with pytest.raises(refused):
            (request if refused is NotInTransaction else ask)("test.echo")
    assert not QueuedMessage.objects.exists()
    with transaction.atomic():
        assert request("test.echo").id


def test_without_require_atomic_the_caller_commits_the_request(
    no_autocommit: None, settings: Any
) -> None:
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}
    echo()
    pending = request("test.echo")
    with second_connection() as other:
        count = "select count(*) from django_mq_queuedmessage"
        assert other.execute(count).fetchone() == (0,)
        with pytest.raises(CannotWait, match="not committed yet"):
            pending.result(timeout=60)
        transaction.commit()
        assert other.execute(count).fetchone() == (1,)


def test_several_handlers_are_refused_by_name() -> None:
    echo()

    @handler("test.#", name="second")
    def second(delivery: Any) -> None: ...

    with pytest.raises(RoutingError, match=r"test\.echo has several handlers.*: echo, second"):
        request("test.echo")
    with pytest.raises(RoutingError):
        ask("test.echo")
    assert not QueuedMessage.objects.exists()
    with transaction.atomic():
        assert len(broadcast("test.echo").ids) == 2


def test_a_handler_that_only_a_worker_knows() -> None:
    """It is routed at delivery; the first of several answers, and nobody asks the others."""
    pending = request("test.later", {"n": 1})

    @handler("test.later", name="a")
    def a(delivery: Any) -> str:
        return "a"

    @handler("test.later", name="b")
    def b(delivery: Any) -> str:
        return "b"

    assert drain() == 2
    assert pending.result() == "a"
    assert Result.objects.count() == 1


@pytest.mark.parametrize("timeout", [-1, "10", float("nan"), object()])
def test_invalid_timeout_is_refused(timeout: Any) -> None:
    echo()
    with pytest.raises(ValueError, match="timeout must be seconds, a timedelta"):
        ask("test.echo", timeout=timeout)
    assert not QueuedMessage.objects.exists()
    with pytest.raises(ValueError, match="timeout"):
        gather(request("test.echo"), timeout=timeout)


# ---- inside and outside a transaction


def test_waiting_is_refused_until_the_block_that_stores_it_ended() -> None:
    """The refusal comes at once, not as a hang; the caller's transaction stays usable."""
    echo()
    with transaction.atomic():
        with transaction.atomic():
            pending = request("test.echo", {"n": 1})
        for wait in (pending.result, lambda: gather(pending, return_exceptions=True)):
            with pytest.raises(CannotWait, match=r"wait after its atomic.*non_atomic_requests"):
                wait()
        with pytest.raises(CannotWait, match="wait after its atomic"):
            async_to_sync(pending.aresult)()
        assert not pending.done()
        Product.objects.create(name="kept", price=1)
    assert not pending.done()
    drain()
    assert pending.done()
    assert pending.result() == {"n": 1}
    assert Product.objects.filter(name="kept").exists()
    with transaction.atomic():  # another transaction, long after the answer
        assert pending.result() == {"n": 1}


def test_rolled_back_request_cannot_be_waited_for() -> None:
    echo()
    pending = request_within({"n": 1}, then=ZeroDivisionError)
    with pytest.raises(CannotWait, match="rolled back"):
        pending.result()
    with pytest.raises(CannotWait, match="rolled back"):
        pending.done()
    with transaction.atomic():
        inner = request_within({"n": 2}, then=ZeroDivisionError)
        with pytest.raises(CannotWait, match="rolled back"):
            inner.result()
    kept = request_within({"n": 3})
    drain()
    with pytest.raises(CannotWait, match="rolled back"):
        pending.result()
    assert kept.result() == {"n": 3}


def test_ask_inside_a_transaction_is_refused_with_a_recipe() -> None:
    echo()
    with transaction.atomic():
        with pytest.raises(CannotWait, match=r"(?s)non_atomic_requests.*pending = request\("):
            ask("test.echo")
        with pytest.raises(CannotWait):
            async_to_sync(aask)("test.echo")
        assert not QueuedMessage.objects.exists()


def test_a_pickled_copy_knows_the_queue_that_its_handler_must_not_wait_for() -> None:
    pending = request("test.echo", queue="same")
    copy = pickle.loads(pickle.dumps(pending))  # noqa: S301

    def wait() -> None:
        set_current(delivery(queue="same"), "default")
        with pytest.raises(CannotWait, match="its own queue, same"):
            copy.result()

    copy_context().run(wait)


def test_a_reply_that_came_in_time_is_returned_although_the_time_is_up() -> None:
    """Another reply of the same `agather()` has used the time."""
    future: Future[ReplyState] = Future()
    state = ReplyState(1, True, False, "1", "", "")
    future.set_result(state)
    assert asyncio.run(_aresult(future, 0.0)) is state


def test_an_atomic_handler_cannot_ask() -> None:
    echo(queue="answers")

    @handler("test.asks", name="asks", queue="questions", retry=NEVER)
    def asks(delivery: Any) -> None:
        ask("test.echo")

    with transaction.atomic():
        broadcast("test.asks")
    drain(errors="keep")
    assert FailedAttempt.objects.get().error_class.endswith("CannotWait")
    assert not QueuedMessage.objects.filter(type="test.echo").exists()


# ---- in a TestCase


class AskTest(TestCase):
    def test_drain_answers(self) -> None:
        echo()
        first, second = request("test.echo", 1), request("test.echo", [2])
        with pytest.raises(ReplyTimeout, match="drain") as caught:
            first.result()  # at once: in this transaction nobody could answer
        assert caught.value.id == first.id
        assert drain() == 2
        assert gather(second, first) == [[2], 1]
        assert first.result(timeout=0) == 1

    def test_ask_works_while_answering(self) -> None:
        echo(queue="answers")

        @handler("test.asks", name="asks", queue="questions", atomic=False)
        def asks(delivery: Any) -> Any:
            return ["asked", ask("test.echo", delivery.payload)]

        with answering():
            assert ask("test.echo", {"n": 1}) == {"n": 1}
            assert ask("test.asks", "through another") == ["asked", "through another"]
        with pytest.raises(ReplyTimeout, match=r"answering\(\):"):
            ask("test.echo")

    async def test_async_in_a_test_case(self) -> None:
        echo()
        with answering():
            assert await aask("test.echo", {"n": 1}) == {"n": 1}
            pendings = [await arequest("test.echo", n) for n in range(3)]
            assert await agather(*pendings) == [0, 1, 2]
            assert await pendings[1].aresult(timeout=0) == 1
            assert await pendings[2].adone()

    def test_requests_are_captured(self) -> None:
        echo()
        with capture_broadcasts() as broadcasts:
            request("test.echo", {"n": 1})
        assert [(each.type, each.payload) for each in broadcasts] == [("test.echo", {"n": 1})]


def test_the_loop_is_not_blocked_unawares() -> None:
    async def main() -> None:
        with pytest.raises(SynchronousOnlyOperation, match="aresult"):
            PendingReply(1, using="default").result()
        with pytest.raises(SynchronousOnlyOperation, match=r"await adone\("):
            PendingReply(1, using="default").done()

    asyncio.run(main())


@pytest.mark.parametrize(("call", "awaitable"), [(ask, "aask"), (request, "arequest")])
def test_in_a_coroutine_they_name_the_async_version(
    call: Callable[[str], Any], awaitable: str
) -> None:
    async def view() -> None:
        call("test.echo")

    with pytest.raises(SynchronousOnlyOperation, match=rf"await {awaitable}\("):
        asyncio.run(view())
