"""Requests in a TestCase's transaction: what is stored, what is refused, what is read."""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test import TestCase

from django_mq import (
    CannotWait,
    InvalidOption,
    InvalidPayload,
    PendingReply,
    Reject,
    RemoteError,
    ReplyTimeout,
    RetryPolicy,
    RoutingError,
    Unanswered,
    UnreadablePayload,
    aask,
    agather,
    arequest,
    ask,
    broadcast,
    cancel,
    gather,
    handler,
    queues,
    request,
)
from django_mq.models import FailedAttempt, QueuedMessage, Result
from django_mq.testing import answering, capture_broadcasts, drain, due
from testproject.shop.models import Product
from tests.rows import add

pytestmark = pytest.mark.django_db

NEVER = RetryPolicy.never()


def echo(**options: Any) -> None:
    @handler("test.echo", name="echo", **options)
    def echo(delivery: Any) -> Any:
        return delivery.payload


def request_within(payload: Any, *, then: type[Exception] | None = None) -> PendingReply:
    """Send a request in a block of its own, which ends with an exception if `then` is given."""
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
    """RMQ-22: what is broadcast beside it is no request, and nothing is kept of it."""
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
    """Routed at delivery; the first of several answers, and the others ask nobody."""
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
def test_a_timeout_that_is_none(timeout: Any) -> None:
    echo()
    with pytest.raises(ValueError, match="timeout must be seconds, a timedelta"):
        ask("test.echo", timeout=timeout)
    assert not QueuedMessage.objects.exists()
    with pytest.raises(ValueError, match="timeout"):
        gather(request("test.echo"), timeout=timeout)


# ---- inside and outside a transaction


def test_waiting_is_refused_until_the_block_that_stores_it_ended() -> None:
    """It says so at once and never hangs; the caller's transaction stays usable."""
    echo()
    with transaction.atomic():
        with transaction.atomic():
            pending = request("test.echo", {"n": 1})
        for wait in (pending.result, lambda: gather(pending, return_exceptions=True)):
            with pytest.raises(CannotWait, match="wait after its atomic"):
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
    with transaction.atomic():  # another one, in which it was answered long ago
        assert pending.result() == {"n": 1}


def test_what_was_rolled_back_will_not_be_answered() -> None:
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
        with pytest.raises(CannotWait, match=r"pending = request\("):
            ask("test.echo")
        with pytest.raises(CannotWait):
            async_to_sync(aask)("test.echo")
        assert not QueuedMessage.objects.exists()


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
            first.result()  # at once: nobody could answer meanwhile
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
        with pytest.raises(ReplyTimeout):
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

    asyncio.run(main())


# ---- what comes back


@pytest.mark.parametrize("value", [None, 0, "", False, [], {"a": [1, {"b": None}]}, "\\u0000"])
def test_any_json_value_is_a_result(value: Any) -> None:
    @handler("test.value", name="value")
    def answer(delivery: Any) -> Any:
        return value

    pending = request("test.value")
    drain()
    assert pending.result() == value
    assert pending.result() == value  # as often as one likes


def test_an_error_is_an_answer_when_it_is_the_last() -> None:
    """Guarantee 10; S14: class and text, cleaned and cut, without a traceback."""

    @handler("test.fails", name="fails", retry=RetryPolicy(max_attempts=2))
    def fails(delivery: Any) -> None:
        raise ValueError(f"attempt {delivery.attempt}\x1b[2J " + "x" * 9000)

    pending = request("test.fails")
    drain(errors="keep")
    assert not pending.done()
    with pytest.raises(ReplyTimeout):
        pending.result()
    due()
    drain(errors="keep")
    assert pending.done()
    with pytest.raises(
        RemoteError, match=rf"message {pending.id} failed: ValueError: at"
    ) as caught:
        pending.result()
    error = caught.value
    assert (error.id, error.error_class) == (pending.id, "ValueError")
    assert error.error_text.startswith("attempt 2\ufffd[2J xxx")
    assert len(error.error_text.encode()) <= 4096
    assert not isinstance(error, Unanswered)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301
    echo()
    fine = request("test.echo", "fine")
    drain()
    [value, returned] = gather(fine, pending, return_exceptions=True)
    assert (value, type(returned)) == ("fine", RemoteError)
    with pytest.raises(RemoteError):
        gather(fine, pending)


def test_reject_is_an_answer() -> None:
    @handler("test.rejects", name="rejects")
    def rejects(delivery: Any) -> None:
        raise Reject("no such friend")

    pending = request("test.rejects")
    drain()
    with pytest.raises(RemoteError, match="Reject: no such friend"):
        pending.result()


def test_what_cannot_be_encoded_is_the_failure_of_its_handler() -> None:
    """Its writes are undone, its neighbours are not touched, its asker is told."""

    @handler("test.bad", name="bad", retry=RetryPolicy(max_attempts=2))
    def bad(delivery: Any) -> Any:
        Product.objects.create(name=f"{delivery.id}, {delivery.attempt}", price=1)
        return {"result": {"when": object() if delivery.payload["bad"] else "now"}}

    bad_one, good_one = (request("test.bad", {"bad": each}) for each in (True, False))
    with transaction.atomic():
        broadcast("test.bad", {"bad": True})  # nobody asks: whatever it returns is well
    drain(errors="keep")
    assert good_one.result() == {"result": {"when": "now"}}
    assert Product.objects.count() == 2
    due()
    drain(errors="keep")
    with pytest.raises(RemoteError, match=r"InvalidPayload: result\.result\.when: Object of type"):
        bad_one.result()
    assert FailedAttempt.objects.filter(message_id=bad_one.id).count() == 2


def test_a_result_has_the_limits_of_a_payload(settings: Any) -> None:
    settings.DJANGO_MQ = {"MAX_PAYLOAD_BYTES": 100, "MAX_DEPTH": 3}

    @handler("test.large", name="large", retry=NEVER)
    def large(delivery: Any) -> Any:
        return [[[[]]]] if delivery.payload["deep"] else "x" * 101

    too_large, too_deep = (request("test.large", {"deep": each}) for each in (False, True))
    drain(errors="keep")
    with pytest.raises(RemoteError, match="PayloadTooLarge: result is 103 bytes"):
        too_large.result()
    with pytest.raises(RemoteError, match="nested too deeply"):
        too_deep.result()


def test_what_finish_is_given_is_the_result() -> None:
    """Encoded as it is at the end of the block; what is returned afterwards goes to nobody."""

    @handler("test.finish", name="finish", atomic=False)
    def finish(delivery: Any) -> Any:
        reply: dict[str, Any] = {}
        with delivery.finish(reply):
            reply["product"] = Product.objects.create(name="made", price=1).name
        return object()

    @handler("test.afinish", name="afinish")
    async def afinish(delivery: Any) -> Any:
        return await delivery.afinish(lambda n: n + 1, delivery.payload)

    @handler("test.plain", name="plain", atomic=False)
    def plain(delivery: Any) -> Any:
        return delivery.payload

    pendings = request("test.finish"), request("test.afinish", 1), request("test.plain", [3])
    drain()
    assert gather(*pendings) == [{"product": "made"}, 2, [3]]
    assert not FailedAttempt.objects.exists()


def test_a_bad_result_of_finish_undoes_its_block() -> None:
    @handler("test.finish", name="finish", atomic=False, retry=NEVER)
    def finish(delivery: Any) -> None:
        with pytest.raises(InvalidPayload), delivery.finish({1, 2}):
            Product.objects.create(name="undone", price=1)
        assert not delivery.finished
        raise Reject("so it is")

    pending = request("test.finish")
    drain()
    assert not Product.objects.exists()
    with pytest.raises(RemoteError, match="so it is"):
        pending.result()


# ---- what nobody will answer


def test_expired() -> None:
    """It expires before it starts; `drain()` buries it as a worker does."""
    echo()
    pending = request("test.echo", expires=60)
    QueuedMessage.objects.update(expires_at=Now() - timedelta(seconds=1))
    drain()
    with pytest.raises(Unanswered, match=rf"message {pending.id} will not be answered: expired"):
        pending.result()


def test_held_for_too_long(settings: Any) -> None:
    settings.DJANGO_MQ = {"HOLD_FOR": 0}
    pending = request("test.unknown")
    drain()
    due()
    drain()
    with pytest.raises(Unanswered, match="held for too long: this worker has no handler"):
        pending.result()


def test_removed_by_hand() -> None:
    echo()
    pendings = [request("test.echo") for _ in range(4)]
    cancel(id=pendings[0].id)
    queues.cancel(pendings[1].id)
    assert queues.purge(type="test.echo", waiting=True, limit=1).ids == (pendings[2].id,)
    QueuedMessage.objects.update(dead_at=Now(), dead_reason="exhausted", last_error="E: text")
    with pytest.raises(Unanswered, match="exhausted: E: text"):  # died without a word
        pendings[3].result()
    queues.discard(pendings[3].id)
    reasons = [str(each) for each in gather(*pendings, return_exceptions=True)]
    assert [each.rpartition(" ")[2] for each in reasons] == [
        "cancelled",
        "cancelled",
        "purged",
        "discarded",
    ]
    assert all(each.done() for each in pendings)


def test_a_dead_letter_that_is_discarded_keeps_its_answer_and_one_requeued_gets_another() -> None:
    @handler("test.fails", name="fails", retry=NEVER)
    def fails(delivery: Any) -> str:
        if delivery.attempt == 1:
            raise ValueError("first")
        return "second"

    discarded, requeued = request("test.fails"), request("test.fails")
    drain(errors="keep")
    queues.discard(discarded.id)
    queues.requeue(requeued.id)
    drain()
    with pytest.raises(RemoteError, match="ValueError: first"):
        discarded.result()
    assert requeued.result() == "second"


# ---- the address


def test_what_is_requeued_is_waited_for() -> None:
    """The error that it died of is no answer any more: there is hope again."""
    broken = True

    @handler("test.echo", name="echo", retry=NEVER)
    def echo(delivery: Any) -> int:
        if broken:
            raise ValueError("no")
        return 7

    pending = request("test.echo")
    drain(errors="keep")
    assert pending.done()
    broken = False
    queues.requeue(pending.id)
    assert not pending.done()
    with pytest.raises(ReplyTimeout):
        pending.result(timeout=0)
    drain()
    assert pending.result() == 7


def test_a_reply_is_found_again_by_its_id() -> None:
    """RMQ-18: asked for twice it is the same address; it travels by id or pickled."""
    echo()
    pending = request("test.echo", {"n": 1})
    others = [PendingReply(pending.id), pickle.loads(pickle.dumps(pending))]  # noqa: S301
    assert others == [pending, pending]
    assert {pending, *others} == {pending}
    assert PendingReply(pending.id + 1) != pending
    assert pending != pending.id
    assert repr(others[1]) == f"<PendingReply {pending.id} test.echo>"
    drain()
    assert gather(pending, *others) == [{"n": 1}] * 3


def test_what_has_no_reply() -> None:
    """An id that nobody has, one that nobody asked, a reply that was forgotten."""
    echo()
    pending = request("test.echo")
    drain()
    Result.objects.all().delete()
    for each in (pending, PendingReply(1), PendingReply(add(queue="mail").pk)):
        with pytest.raises(CannotWait, match="no reply to message"):
            each.result()
    assert gather(pending, return_exceptions=True)[0].__class__ is CannotWait


@pytest.mark.parametrize("id", ["7", True, 0, -1, 2**63, None, 1.0])
def test_what_is_no_id(id: Any) -> None:
    """One waits for the replies of all: what it cannot look for would fail for everybody."""
    with pytest.raises(InvalidOption, match="id must be a whole number"):
        PendingReply(id)


def test_what_is_no_request() -> None:
    echo()
    pending = request("test.echo")
    for wrong in ([pending], pending.id):
        with pytest.raises(TypeError, match="gather\\(p1, p2\\)"):
            gather(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="gather\\(p1, p2\\)"):
            async_to_sync(agather)(pending, wrong)  # type: ignore[arg-type]


def test_a_result_that_somebody_else_wrote() -> None:
    """Guarantee: rows may come from others; what cannot be read is an error of that one alone."""
    good, bad = (Result.objects.create(message_id=n, value=n) for n in (1, 2))
    with connection.cursor() as cursor:
        cursor.execute(
            "update django_mq_result set value = %s::jsonb where message_id = 2",
            ["1" * 5000],
        )
    found = gather(PendingReply(good.pk), PendingReply(bad.pk), return_exceptions=True)
    assert found[0] == 1
    assert isinstance(found[1], UnreadablePayload)
